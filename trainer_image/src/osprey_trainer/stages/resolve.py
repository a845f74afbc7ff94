"""Pin the external inputs of a resource, and check what can be checked before anything large is downloaded.

A model is pinned to its commit or content, data to its commit or content; of files every row is read and judged, so
that data with too many broken rows ends the resource here and not after hours of another stage. Of a hub data set only
the first rows are: all of it may be terabytes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from osprey_api.backbone import KIND as BACKBONE_KIND
from osprey_api.rows import shortened
from osprey_api.sources import HubSource, parse
from osprey_api.stages import DataToResolve, PinnedData, ResolveConfig, ResolveResult, StorageLocation
from osprey_runtime.context import StageContext
from osprey_runtime.data import Ledger, documents, pin
from osprey_runtime.models import resolve_model
from osprey_runtime.prompts import conversations
from osprey_runtime.store import open_store
from osprey_trainer.models.supported import check_backbone, check_target
from osprey_trainer.models.target import default_tapped_layers

_HUB_ROWS = 100


def run(ctx: StageContext) -> ResolveResult:
    """Pins model and data.

    Raises:
        StageError: the storage cannot be used; the model or data is missing, forbidden or broken;
            UNSUPPORTED_MODEL by the name of its architecture.
    """
    config = cast(ResolveConfig, ctx.config)
    storage = ctx.task.storage
    open_store(storage).probe()
    of_backbone = ctx.task.resource.partition("/")[0] == BACKBONE_KIND.lower()
    check = check_backbone if of_backbone else check_target if config.teaches else _unchecked
    model, facts = resolve_model(config.model.uri, config.model.revision, storage, check=check)
    if not of_backbone:
        default_tapped_layers(facts.layers)
    ctx.progress.begin(len(config.data))
    data = []
    for done, source in enumerate(config.data, start=1):
        data.append(_pinned(source, storage))
        ctx.progress.update(done)
    return ResolveResult(model=model, facts=facts, data=tuple(data))


def _unchecked(_uri: str, _config: Mapping[str, Any]) -> None:
    """What SGLang alone is to run, it judges itself."""


def _pinned(data: DataToResolve, storage: StorageLocation) -> PinnedData:
    source = pin(data.uri, storage)
    from_hub = isinstance(parse(data.uri), HubSource)
    limit = _HUB_ROWS if from_hub else None
    ledger = Ledger(data.uri, data.max_dropped)
    if data.field is not None and data.kind == "Text":
        found: Iterator[object] = documents(source, data.field, storage, ledger, limit=limit)
    else:
        found = conversations(source, data.field, storage, ledger, limit=limit)
    for _ in found:
        pass
    kept = None if from_hub else ledger.kept
    return PinnedData(name=data.name, source=source, rows=kept, dropped=shortened(ledger.dropped))
