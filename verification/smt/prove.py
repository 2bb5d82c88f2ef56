"""The proofs for any number, as `rlt-verify` asks them: files in, results out, nothing raised for want of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlt_fsm.load import load
from rlt_fsm.model import System
from verification.result import Result
from verification.smt.parametric import SCOPE, Parametric
from verification.smt.ranking import NAME, runs_end
from verification.smt.window import Refused

COUNTED = {"b": "destination_storage", "s": "source_storage"}  # sort -> the constant that counts its instances
QUERY_SECONDS_MAX = 20.0


def counts(system: System) -> dict[str, str]:
    """The sorts of `system` whose instances a constant counts."""
    return {sort: const for sort, const in COUNTED.items() if sort in system.instances and const in system.consts}


def prove(
    paths: list[str] | None, counted: Mapping[str, str] | None = None, timeout_s: float = QUERY_SECONDS_MAX
) -> list[Result]:
    """Prove every safety property of the spec under `paths` for any number of instances.

    counted: the constants that count instances, if not those of `COUNTED`. A spec that the argument does not
    cover gives one Unknown that names the place.
    """
    system = load([Path(p) for p in paths] if paths else None).need_system()
    try:
        return Parametric(system, counts(system) if counted is None else counted, timeout_s).run()
    except Refused as refused:
        return [Result("induction", "induction", "smt", SCOPE, "unknown", f"not asked: {refused}")]


def prove_all(paths: list[str] | None) -> list[Result]:
    """As `prove`, and that every fair run is finite, which leans on all of it."""
    system = load([Path(p) for p in paths] if paths else None).need_system()
    try:
        proof = Parametric(system, counts(system), QUERY_SECONDS_MAX)
        results = proof.run()
        return [*results, endings(proof, results)]
    except Refused as refused:
        why = f"not asked: {refused}"
        return [
            Result("induction", "induction", "smt", SCOPE, "unknown", why),
            Result(NAME, "ranking", "ranking", SCOPE, "unknown", why),
        ]


def prove_endings(
    paths: list[str] | None, finite: Mapping[str, str] | None = None, timeout_s: float = QUERY_SECONDS_MAX
) -> Result:
    """Prove that every fair run of the spec under `paths` is finite; first the invariant that this leans on.

    finite: actions that are taken to happen finitely often, with the reason.
    """
    system = load([Path(p) for p in paths] if paths else None).need_system()
    try:
        proof = Parametric(system, counts(system), timeout_s)
        return endings(proof, proof.run(), finite)
    except Refused as refused:
        return Result(NAME, "ranking", "ranking", SCOPE, "unknown", f"not asked: {refused}")


def endings(proof: Parametric, invariant: list[Result], finite: Mapping[str, str] | None = None) -> Result:
    """That every fair run is finite, if `invariant`, which it leans on, was proved."""
    lost = [result.name for result in invariant if not result.holds]
    if not lost:
        return runs_end(proof, finite)
    why = f"it leans on {', '.join(lost[:3])}{' and others' if lost[3:] else ''}, which did not hold"
    return Result(NAME, "ranking", "ranking", SCOPE, "unknown", why)
