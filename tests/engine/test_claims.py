"""A client is either trained where it was sent to or given back, never both and never neither."""

from raysim.engine.claims import Claims


def test_what_was_not_begun_is_given_back_and_left_out_once():
    """Of 1, 2, 3 the first is begun: 2 and 3 can be given back; when 3 comes again, it is trained."""
    claims = Claims()
    assert claims.begin(1, [1]) == [True]
    assert claims.give_back(1, [1, 2, 3]) == [False, True, True]
    assert claims.begin(1, [2, 3, 4]) == [False, False, True]
    assert claims.begin(1, [3]) == [True]
    assert claims.give_back(1, [3]) == [False]


def test_rounds_are_told_apart():
    """Client 1 was trained in round 1, and waits for round 2."""
    claims = Claims()
    assert claims.begin(1, [1, 2]) == [True, True]
    assert claims.give_back(2, [1]) == [True]
    assert claims.begin(1, [3]) == [True]
    assert claims.begin(2, [1, 2]) == [False, True]
    assert claims.begin(2, [1]) == [True]
