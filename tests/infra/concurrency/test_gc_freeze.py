import gc

from infra.concurrency import gc_freeze


def test_what_is_here_is_passed_over_once() -> None:
    gc_freeze.pass_over_what_is_here.cache_clear()
    gc.unfreeze()
    here: list[list[object]] = [[]]
    gc_freeze.pass_over_what_is_here()
    later: list[list[object]] = [[]]
    gc_freeze.pass_over_what_is_here()
    looked_through = {id(each) for each in gc.get_objects()}
    assert id(here) not in looked_through
    assert id(later) in looked_through
