import gc

from infra import collector


def test_what_is_here_is_passed_over_once() -> None:
    collector.pass_over_what_is_here.cache_clear()
    gc.unfreeze()
    here: list[list[object]] = [[]]
    collector.pass_over_what_is_here()
    later: list[list[object]] = [[]]
    collector.pass_over_what_is_here()
    looked_through = {id(each) for each in gc.get_objects()}
    assert id(here) not in looked_through
    assert id(later) in looked_through
