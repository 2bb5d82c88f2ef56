"""Every mutant of a spec, judged: `mutate` runs the sweep on several processes, `show` prints what it found.

The sweep passes where each mutant has one of the three classes and each written reason is needed. A mutant that fits
none is a finding about the spec: a property or scope is missing, or a part does nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlt_fsm.model import Spec
from verification.mutation.equivalents import EQUIVALENTS, matches, reason_for
from verification.mutation.judge import (
    EQUIVALENT,
    EVIDENCE,
    REDUNDANT,
    REFUTED,
    UNCLASSIFIED,
    Basis,
    Outcome,
    basis,
    judge,
)
from verification.mutation.mutants import Mutant, Variant, variants

SECONDS_MAX = 90  # for one mutant, then it is unclassified


@dataclass(slots=True)
class Sweep:
    """The outcomes in the order of the tables, and the written reasons that nothing needs."""

    outcomes: list[Outcome] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    seconds: float = 0.0
    digest: str = ""

    def of(self, verdict: str) -> list[Outcome]:
        """The outcomes of one class."""
        return [o for o in self.outcomes if o.verdict == verdict]

    @property
    def exit_code(self) -> int:
        """0 where every mutant has a class and every reason is needed; 1 otherwise."""
        return 1 if self.stale or self.of(UNCLASSIFIED) else 0

    def to_json(self) -> str:
        """All of it, for other tools."""
        outcomes = [{**asdict(o), "mutant": asdict(o.mutant)} for o in self.outcomes]
        return json.dumps(
            {"digest": self.digest, "seconds": round(self.seconds, 1), "stale": self.stale, "outcomes": outcomes},
            indent=1,
        )


def mutate(
    spec: Spec,
    only: str = "",
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
    equivalents: Mapping[str, str] = EQUIVALENTS,
    suite: str = "quick",
) -> Sweep:
    """Judge every mutant whose id begins with `only`, on `jobs` processes (one for each processor, if not given).

    Raises LookupError where no id begins so, ValueError where the spec does not hold before any change.
    """
    started = time.perf_counter()
    all_of_them = list(variants(spec.need_system()))
    chosen = [v for v in all_of_them if v.mutant.id.startswith(only)]
    if not chosen:
        raise LookupError(f"no mutant '{only}...'; ids look like {all_of_them[0].mutant.id}")
    say = progress or (lambda text: None)
    say(f"the spec itself: scopes of suite '{suite}', and the induction")
    ground_truth = basis(spec, suite)
    sweep = Sweep(digest=spec.digest)
    said = started
    for outcome in _judged(ground_truth, chosen, equivalents, jobs or os.cpu_count() or 1):
        sweep.outcomes.append(outcome)
        now = time.perf_counter()
        if outcome.verdict == UNCLASSIFIED:
            say(f"unclassified: {outcome.mutant.id}: {outcome.by}")
        if now - said > 5:
            said = now
            counts = ", ".join(f"{len(sweep.of(v))} {v}" for v in (REFUTED, REDUNDANT, EQUIVALENT, UNCLASSIFIED))
            say(f"{len(sweep.outcomes)} of {len(chosen)} mutants: {counts}; {now - started:.0f} s")
    order = {v.mutant.id: place for place, v in enumerate(chosen)}
    sweep.outcomes.sort(key=lambda o: order[o.mutant.id])
    sweep.stale = _stale(sweep, all_of_them, equivalents, only)
    sweep.seconds = time.perf_counter() - started
    return sweep


def _stale(sweep: Sweep, all_of_them: list[Variant], equivalents: Mapping[str, str], only: str) -> list[str]:
    """The written reasons that nothing needs, with why. After a sweep of a part, only what that part can tell."""
    needed = {reason_for(o.mutant.id, equivalents) for o in sweep.of(EQUIVALENT)}
    out = []
    for pattern in equivalents:
        covered = [o for o in sweep.outcomes if matches(pattern, o.mutant.id)]
        if not any(matches(pattern, v.mutant.id) for v in all_of_them):
            out.append(f"{pattern}: there is no such mutant")
        elif pattern not in needed and (covered or not only):
            found = (
                ", ".join(f"{o.mutant.id} is {o.verdict} ({o.by})" for o in covered[:2]) or "another reason comes first"
            )
            out.append(f"{pattern}: {found}")
    return out


def load_outcomes(file: Path, digest: str) -> list[Outcome]:
    """What `to_json` wrote. Raises LookupError, with the file, where it is not that, or is about another spec."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        outcomes = [Outcome(**{**item, "mutant": Mutant(**item["mutant"])}) for item in read["outcomes"]]
        about = read["digest"]
    except OSError as error:
        raise LookupError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise LookupError(f"{file}: not what `rlt-verify mutate --json` writes") from None
    if about != digest:
        raise LookupError(f"{file} is about spec {about}, this is {digest}: run `rlt-verify mutate --json` again")
    return outcomes


# -- processes ------------------------------------------------------------------------------------------------

_shared: tuple[Basis, list[Variant], Mapping[str, str]] | None = None  # what forked processes find in place


def _judged(ground_truth: Basis, chosen: list[Variant], equivalents: Mapping[str, str], jobs: int) -> Iterator[Outcome]:
    """Outcomes as they come. The processes are forked, so that the searched scopes are not copied."""
    global _shared
    _shared = ground_truth, chosen, equivalents
    try:
        if jobs == 1:
            yield from map(_judge_one, range(len(chosen)))
            return
        with multiprocessing.get_context("fork").Pool(min(jobs, len(chosen))) as pool:
            yield from pool.imap_unordered(_judge_one, range(len(chosen)))
    finally:
        _shared = None


class _TooLong(Exception):
    """A mutant has had its time."""


def _judge_one(place: int) -> Outcome:
    assert _shared is not None
    ground_truth, chosen, equivalents = _shared
    variant = chosen[place]

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_MAX)
    try:
        return judge(ground_truth, variant, equivalents)
    except _TooLong:
        return Outcome(variant.mutant, UNCLASSIFIED, f"not judged within {SECONDS_MAX} s")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- text -----------------------------------------------------------------------------------------------------


def show(sweep: Sweep) -> str:
    """What needs attention first, then the classes one by one, then the counts."""
    lines: list[str] = []
    for outcome in sweep.of(UNCLASSIFIED):
        mutant = outcome.mutant
        lines += [f"UNCLASSIFIED {mutant.id}", f"  {mutant.place}: {mutant.what}", f"  {outcome.by}"]
    lines += [f"STALE REASON {text}" for text in sweep.stale]
    for verdict in (EQUIVALENT, REDUNDANT, REFUTED):
        found = sweep.of(verdict)
        if not found:
            continue
        lines += ["", f"{verdict} ({len(found)})"]
        for o in found:
            where = f"{o.evidence}: {o.by}"
            if verdict == REFUTED:
                where += f" in {o.scope}" + (f", {o.trace_length} steps" if o.trace_length else "")
            lines.append(f"  {o.mutant.id:64} {where}")
    counts = Counter(o.verdict for o in sweep.outcomes)
    evidence = Counter(o.evidence for o in sweep.of(REFUTED))
    by = ", ".join(f"{evidence[name]} by {name}" for name in EVIDENCE if evidence[name])
    lines += [
        "",
        f"{len(sweep.outcomes)} mutants in {sweep.seconds:.0f} s: {counts[REFUTED]} refuted"
        + (f" ({by})" if by else "")
        + f", {counts[REDUNDANT]} proved redundant, {counts[EQUIVALENT]} equivalent by a written reason, "
        f"{counts[UNCLASSIFIED]} unclassified, {len(sweep.stale)} stale",
    ]
    return "\n".join(lines)
