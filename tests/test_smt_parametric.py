"""Induction for any number of instances: the shipped spec, what must make it fail, and what it refuses to speak of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guard_deletions import EDITS, apply
from inn import COUNTED, OWNED, OWNER, PROMISED, SLEEP
from inn import inn as spec_of

from rlt_fsm.expr import BOOL, INT, Const, Node, Op, Ref, show
from rlt_fsm.ground import ground
from rlt_fsm.load import load
from rlt_fsm.model import System
from verification.result import Result
from verification.smt.induction import Induction
from verification.smt.matching import counted
from verification.smt.parametric import Parametric, clauses_of
from verification.smt.prove import prove
from verification.smt.reading import UNKNOWN, UNSAT, Cvc5Solver, Z3Solver
from verification.smt.window import Refused

# -- the shipped spec -------------------------------------------------------------------------------


def test_the_shipped_spec_is_proved_for_any_number() -> None:
    """Goal: safety for any number of generations, storages and chunks. Method: every clause over every step, by z3."""
    system = load().need_system()

    results = prove(None)

    assert not [(r.name, r.why) for r in results if not r.holds]
    assert {r.kind for r in results} == {"always", "lemma", "handled", "in_order", "bounds"}
    assert {p.name for p in system.properties if p.kind in ("always", "lemma")} <= {r.name for r in results}
    messages = {f"handled:{c.name}.{m}" for c in system.channels.values() for m in c.messages}
    assert messages <= {r.name.split(" ")[0] for r in results}
    assert all("'destination_storage' is the number of 'b'" in r.why for r in results), "the condition is not said"


def test_credits_need_their_condition() -> None:
    """Goal: a proof leans on nothing that it does not say. Method: without the number of storages credits fall."""
    results = prove(None, counted={})

    assert {r.name for r in results if r.trace is not None} >= {"credits_are_promises", "source_credits_are_promises"}
    assert not any(r.holds for r in results), "a broken clause must take every proof with it"


@pytest.mark.parametrize(
    ("name", "falls"),
    [
        ("release_source_with_posted_handles", "no_send_after_reuse"),  # in the window alone
        ("a_local_done_taken_for_delivery", "a_writer_is_a_hold"),  # by way of a lemma
        ("a_suspended_request_keeps_its_slot_for_ever", "slots_are_conserved"),  # a sum over all
    ],
)
def test_a_deleted_guard_is_not_proved(name: str, falls: str, tmp_path: Path) -> None:
    """Goal: the proof leans on the guards. Method: hand edits of the spec, each of which leaves something unproved."""
    (edit,) = [e for e in EDITS if e.name == name]
    apply(edit, tmp_path)

    results = prove([str(tmp_path)])

    assert falls in {r.name for r in results if r.trace is not None}
    assert not any(r.holds for r in results), "a broken clause must take every proof with it"
    assert {r.verdict for r in results} == {"unknown"}, "a state that induction starts from need not be reachable"


# -- a small one --------------------------------------------------------------------------------------


def inn(folder: Path, asked: str, *rest: Any, **options: str) -> System:
    """The inn, asked one thing."""
    return spec_of(folder, asked, *rest, **options).need_system()


def verdicts(results: list[Result]) -> set[str]:
    """What `asked` was found to be."""
    return {r.verdict for r in results if r.name == "asked"}


def test_what_holds_of_two_is_not_taken_for_all(tmp_path: Path) -> None:
    """Goal: more than what the window shows. Method: a bound that two guests cannot break, and three can."""
    system = inn(tmp_path, "count(r: Guest[r].state == in_) <= 2")

    few = Induction(ground(system, {"r": 2, "b": 2})).run()
    many = Parametric(system, COUNTED).run()

    assert verdicts(few) == {"proved"} and verdicts(many) == {"unknown"}


@pytest.mark.parametrize(
    ("asked", "lemmas", "expected"),
    [
        (PROMISED, (), "proved"),
        ("count(r: Guest[r].state == in_) <= beds", (PROMISED,), "proved"),
        ("count(r: Guest[r].state == in_) < beds or desk.free == 0", (PROMISED,), "proved"),
        ("count(r: Guest[r].state == in_) < beds", (PROMISED,), "unknown"),
        ("sum(r: nights[r]) >= 0", (), "proved"),
        ("sum(r: nights[r]) <= 9", (), "unknown"),
        ("any(r: nights[r] > 0) implies sum(r: nights[r]) > 0", (), "proved"),
        ("all(r, b: sleeper[b] == r implies Guest[r].state == in_)", (OWNED, OWNER), "proved"),
        ("desk.free <= count(b: sleeper[b] == none)", (PROMISED, OWNED, OWNER), "proved"),
        ("desk.free < count(b: sleeper[b] == none)", (PROMISED, OWNED, OWNER), "unknown"),
        ("desk.free <= count(b: sleeper[b] == none)", (PROMISED, OWNER), "unknown"),  # nothing need be given back
        (OWNER, (), "proved"),
        (OWNED, (), "proved"),
        (OWNED.replace(" and bed[r] == b", ""), (), "unknown"),  # the bed given back may be another's
    ],
)
def test_sums_matchings_and_owners(asked: str, lemmas: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    """Goal: what the rest contributes is neither forgotten nor invented. Method: true and false statements over all."""
    assert verdicts(Parametric(inn(tmp_path, asked, lemmas), COUNTED).run()) == {expected}


def test_what_a_matching_counts(tmp_path: Path) -> None:
    """Goal: owners and owned are counted where each has one of the other, only. Method: with both lemmas, and less."""

    def said(*lemmas: str) -> list[str]:
        return [show(c.matrix) for c in counted(clauses_of(inn(tmp_path, PROMISED, lemmas)), COUNTED)]

    assert said(OWNED, OWNER) == ["count(b: sleeper[b] == -1) + count(r: Guest[r].state == in_) == beds"]
    assert not said(OWNED) and not said(OWNER)
    assert not said(OWNED, OWNER.replace("bed[r] == b and ", ""))  # two beds may be of one guest
    assert not said(OWNED, OWNER.replace(" and Guest[r].state == in_", ""))  # a bed may be of one who left
    assert not said(OWNED.replace("Guest[r].state == in_", "nights[r] > 0"), OWNER)  # who owns is not who is owned
    assert not said(OWNED, OWNER, "count(b: sleeper[b] == none) + count(r: Guest[r].state == in_) == beds")
    assert not counted(clauses_of(inn(tmp_path, PROMISED, (OWNED, OWNER))), {})


def test_an_event_that_meets_no_row_is_not_handled(tmp_path: Path) -> None:
    """Goal: what cannot be refused finds a row. Method: leaving that is not offered, at any time and when inside."""
    always = Parametric(inn(tmp_path, PROMISED, offered=""), COUNTED).run()
    inside = Parametric(inn(tmp_path, PROMISED, offered="", when=", when: 'Guest[r].state == in_'"), COUNTED).run()

    assert [r.name for r in always if r.trace is not None] == ["handled:leave r0"]
    assert all(r.holds for r in inside) and "handled:leave r0" in {r.name for r in inside}


def test_every_instance_may_act_on_all(tmp_path: Path) -> None:
    """Goal: a quantifier in an effect ranges over all. Method: a flag raised by any guest's second night."""
    sleep = SLEEP + ", uneasy: 'uneasy or any(r: nights[r] > 1)'"
    twice, thrice = ("uneasy implies any(r: nights[r] > 1)", "uneasy implies any(r: nights[r] > 2)")

    assert verdicts(Parametric(inn(tmp_path, twice, (), sleep)).run()) == {"proved"}
    assert verdicts(Parametric(inn(tmp_path, thrice, (), sleep)).run()) == {"unknown"}


def test_what_a_step_has_changed_is_not_read_as_it_was(tmp_path: Path) -> None:
    """Goal: no old value for a new one. Method: an effect asks all guests for what its action has just changed."""
    system = inn(tmp_path, PROMISED, enter="set: {'nights[r]': '1'},", take=", uneasy: 'any(r: nights[r] > 0)'")

    with pytest.raises(Refused, match=r"reads any.*after an effect of the same step changed it"):
        Parametric(system, COUNTED)


@pytest.mark.parametrize(
    ("asked", "sleep", "why"),
    [
        ("all(r, b: sleeper[b] == r implies r > 0)", SLEEP, "'r' is an instance, used as a number"),
        ("all(b: sleeper[b] == 0)", SLEEP, "compares an instance with something else"),
        ("all(r, b: rival[r] == sleeper[b])", SLEEP, "compares two pointers"),
        ("all(r, b: bed[r] == b implies nights[r] < b)", SLEEP, "'b' is an instance, used as a number"),
        ("all(r: rival[r] == none)", "'nights[r]': r", "'r' is an instance, used as a number"),
        ("all(r: rival[r] == none)", "'rival[r]': '0'", "'0' names a particular instance"),
    ],
)
def test_a_spec_that_tells_instances_apart_is_refused(asked: str, sleep: str, why: str, tmp_path: Path) -> None:
    """Goal: the hypotheses are checked, not presumed. Method: one breach each; its place is named."""
    system = inn(tmp_path, asked, (), sleep)

    with pytest.raises(Refused, match=why.replace("(", r"\(")) as caught:
        Parametric(system, COUNTED)
    results = prove([str(tmp_path)], COUNTED)

    assert "inn.yaml:" in str(caught.value)
    assert [(r.verdict, r.name) for r in results] == [("unknown", "induction")]
    assert "not asked: " in results[0].why and why in results[0].why


def test_a_step_names_one_instance_of_a_sort(tmp_path: Path) -> None:
    """Goal: two named instances are enough. Method: a guest who takes two beds in one step."""
    inn(tmp_path, PROMISED)
    file = tmp_path / "inn.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("do: [take]", "do: [take, take]"), encoding="utf-8")

    with pytest.raises(Refused, match=r"inn\.yaml:.* names two instances of one sort: r, b, b"):
        Parametric(load([tmp_path]).need_system(), COUNTED)


def test_only_a_constant_counts(tmp_path: Path) -> None:
    """Goal: the conditions of a proof are of the spec. Method: a sort and a constant that it does not have."""
    system = inn(tmp_path, PROMISED)

    for by in ({"b": "rooms"}, {"s": "beds"}):
        with pytest.raises(Refused, match="cannot count"):
            Parametric(system, by)


# -- solvers ----------------------------------------------------------------------------------------


class Tiring(Z3Solver):
    """Answers so many questions, of all that are put to any of its kind, and then no more."""

    left = 0

    def check(self) -> str:
        Tiring.left -= 1
        self.why = "tired"
        return super().check() if Tiring.left >= 0 else UNKNOWN


def test_a_question_without_answer_spoils_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: `unknown` is never an answer. Method: a proof that holds, with a solver that gives up ever later."""
    system = inn(tmp_path, "count(r: Guest[r].state == in_) <= beds", (PROMISED,))
    for answered in range(100):
        monkeypatch.setattr(Tiring, "left", answered)
        results = Parametric(system, COUNTED, make=Tiring).run()
        if Tiring.left >= 0:
            break  # it was never asked more
        assert {r.verdict for r in results} == {"unknown"}, f"proved with no more than {answered} answers"
        assert any("tired" in r.why for r in results)

    assert answered > 9 and all(r.holds for r in results)


def pigeons(holes: int) -> list[Node]:
    """One pigeon more than holes, each in one of them, no two in the same."""
    homes = [Ref(f"home{n}") for n in range(holes + 1)]
    out: list[Node] = []
    for place, home in enumerate(homes):
        out += [Op(">=", (home, Const(0, INT)), BOOL), Op("<", (home, Const(holes, INT)), BOOL)]
        out += [Op("!=", (home, other), BOOL) for other in homes[:place]]
    return out


def test_a_solver_without_time_proves_nothing_by_it() -> None:
    """Goal: a time-out is Unknown. Method: one millisecond for a pigeonhole that takes seconds."""
    for solver in (Z3Solver(0.001), Cvc5Solver(0.001)):
        solver.add(*pigeons(9))
        assert solver.check() == UNKNOWN
        assert solver.why

    for solver in (Z3Solver(20.0), Cvc5Solver(20.0)):
        solver.add(*pigeons(3))
        assert solver.check() == UNSAT
