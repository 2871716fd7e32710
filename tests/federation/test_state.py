"""The server's state: what clients keep is told apart by round without copies."""

from raysim.federation.state import ClientStates


def test_the_newest_states_and_those_before_are_both_right_and_nothing_is_copied():
    """Clients 1 and 2 after a round, then 2 and 3: the state before the second round does not see its changes."""
    empty = ClientStates()
    first = empty.after({1: "a", 2: "b"})
    second = first.after({2: "c", 3: "d"})
    assert dict(first.items()) == {1: "a", 2: "b"} and len(first) == 2
    assert dict(second.items()) == {1: "a", 2: "c", 3: "d"} and len(second) == 3
    assert (second.get(2), first.get(2), second.get(7)) == ("c", "b", None)
    assert second._earlier is first._earlier


def test_a_round_that_is_begun_again_from_the_same_state_finds_the_same_states():
    first = ClientStates().after({1: "a"})
    first.after({1: "given up"})
    again = first.after({1: "b"})
    assert first.get(1) == "a" and dict(again.items()) == {1: "b"}
