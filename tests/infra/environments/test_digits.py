"""The game of digits: what it asks, and what it rewards."""

from infra.environments.examples.digits import NUM_TURNS, Digits


def test_each_turn_is_rewarded_by_the_share_of_the_digit_that_was_asked_for() -> None:
    game = Digits()
    observation = game.reset({"question": "a"})
    rewards, is_done = [], False
    for text in ("{0}{0} = {0}", "no", ""):
        wanted = observation.removeprefix("Write ").removesuffix(".")
        observation, reward, is_done = game.step(text.format(wanted))
        rewards.append(reward)
    assert rewards == [0.75, 0.0, 0.0] and is_done


def test_other_questions_ask_for_other_digits_and_the_same_one_for_the_same() -> None:
    asked = [Digits() for _ in range(20)]
    for number, game in enumerate(asked):
        game.reset({"question": str(number)})
    assert len({game.wanted for game in asked}) > 10 and all(len(game.wanted) == NUM_TURNS for game in asked)
    again = Digits()
    again.reset({"question": "3"})
    assert again.wanted == asked[3].wanted
