"""What is known of the cluster: filled by the watches and, at once, by what this operator writes.

So a Job that was just created is not created twice before its watch shows it. Versions tell which of two copies is
newer. A deletion that happened while a watch was cut is never told: what is here is a hint, to be read again by
whoever waits on it.
"""

from collections.abc import Iterable, Iterator

from osprey_operator.children import is_deleting, uid_of
from osprey_operator.state import KubernetesObject

REMEMBERED = 10000
"""Deleted objects that are remembered: watches are behind by seconds."""


class Cache:
    """Objects by kind, namespace and name."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], dict[str, KubernetesObject]] = {}
        self._gone: dict[str, None] = {}  # UIDs, the latest last

    def put(self, found: KubernetesObject) -> None:
        """Keep an object, unless a newer copy is here or it was deleted: its watch may be behind."""
        if uid_of(found) in self._gone and not is_deleting(found):
            return
        known = self._of(found)
        name = found["metadata"]["name"]
        if name not in known or _version(found) >= _version(known[name]):
            known[name] = found

    def drop(self, gone: KubernetesObject) -> None:
        """Forget an object, unless another one has its name by now."""
        self._gone[uid_of(gone)] = None
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        known = self._of(gone)
        name = gone["metadata"]["name"]
        if name in known and uid_of(known[name]) == uid_of(gone):
            del known[name]

    def get(self, kind: str, namespace: str, name: str) -> KubernetesObject | None:
        """Return an object, if it is known."""
        return self._objects.get((kind, namespace), {}).get(name)

    def of(self, kind: str, namespace: str) -> tuple[KubernetesObject, ...]:
        """Return the objects of a kind in a namespace."""
        return tuple(self._objects.get((kind, namespace), {}).values())

    def everywhere(self, kind: str) -> Iterator[KubernetesObject]:
        """Yield the objects of a kind in all namespaces."""
        for (known_kind, _), objects in list(self._objects.items()):
            if known_kind == kind:
                yield from list(objects.values())

    def reconcile(self, known: Iterable[KubernetesObject], found: Iterable[KubernetesObject]) -> None:
        """Replace some known objects by a list that was just read: those missing there are gone."""
        present = {uid_of(each) for each in found}
        for each in known:
            if uid_of(each) not in present:
                self.drop(each)
        for each in found:
            self.put(each)

    def _of(self, each: KubernetesObject) -> dict[str, KubernetesObject]:
        return self._objects.setdefault((each["kind"], each["metadata"]["namespace"]), {})


def _version(each: KubernetesObject) -> int:
    """Return an object's resourceVersion, which grows over all objects of a kind."""
    return int(each["metadata"].get("resourceVersion", 0))
