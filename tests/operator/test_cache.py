from osprey_operator.cache import Cache


def thing(name="a", uid="1", version="1", **metadata):
    return {
        "kind": "Job",
        "metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": version, **metadata},
    }


def test_the_newer_copy_stays_and_versions_are_numbers():
    cache = Cache()
    cache.put(thing(version="10"))
    cache.put(thing(version="9"))
    assert cache.get("Job", "ns", "a")["metadata"]["resourceVersion"] == "10"
    cache.put(thing(version="100"))
    assert cache.get("Job", "ns", "a")["metadata"]["resourceVersion"] == "100"


def test_a_watch_that_is_behind_does_not_bring_back_what_was_deleted():
    cache = Cache()
    cache.put(thing())
    cache.drop(thing())
    cache.put(thing(version="2"))
    assert cache.of("Job", "ns") == ()
    going = thing(version="3", deletionTimestamp="2026-01-01T00:00:00Z")
    cache.put(going)  # it has a finalizer: whoever wants the name has to wait
    assert cache.of("Job", "ns") == (going,)


def test_a_late_word_of_the_former_object_does_not_touch_its_successor():
    cache = Cache()
    cache.put(thing(uid="2", version="5"))
    cache.put(thing(uid="1", version="4"))
    cache.drop(thing(uid="1", version="4"))
    assert cache.get("Job", "ns", "a")["metadata"]["uid"] == "2"


def test_a_list_that_was_read_anew_tells_what_is_gone():
    cache = Cache()
    for name in "abc":
        cache.put(thing(name=name, uid=name))
    known = [each for each in cache.of("Job", "ns") if each["metadata"]["name"] != "c"]
    cache.reconcile(known, [thing(name="b", uid="b", version="7"), thing(name="d", uid="d")])
    assert {each["metadata"]["name"] for each in cache.of("Job", "ns")} == {"b", "c", "d"}
    assert cache.get("Job", "ns", "b")["metadata"]["resourceVersion"] == "7"


def test_namespaces_are_apart():
    cache = Cache()
    cache.put(thing())
    assert cache.of("Job", "other") == ()
    assert list(cache.everywhere("Job")) == [thing()]
    assert list(cache.everywhere("Pod")) == []
