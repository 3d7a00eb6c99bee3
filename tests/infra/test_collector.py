import gc

from infra import collector


def test_what_is_here_is_passed_over_once() -> None:
    collector.pass_over_what_is_here.cache_clear()
    gc.unfreeze()
    here = [[] for _ in range(1000)]
    collector.pass_over_what_is_here()
    num_frozen = gc.get_freeze_count()
    assert num_frozen > len(here)
    later: list[list[object]] = [[]]
    collector.pass_over_what_is_here()
    assert gc.get_freeze_count() == num_frozen
    assert any(each is later for each in gc.get_objects())
    assert not any(each is here for each in gc.get_objects())
