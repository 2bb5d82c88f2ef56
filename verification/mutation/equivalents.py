"""Mutants that no property and no solver tells from the spec, each with the reason why it may be so.

A key is the id of a mutant, or a pattern in which `*` stands for anything. An entry is wrong where no mutant has such
an id, or none of them needs the reason because they are refuted or proved redundant after all; the sweep then fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

EQUIVALENTS: Mapping[str, str] = {
    # -- Coordinator ---------------------------------------------------------------------------------------------
    "Coordinator.refuse[not_serving]:*+*": (
        "Refused later: a worker that drains, stops or fails ends in 'stopped' or 'failed', and the other follows "
        "it out of service. One of them lets the row hold, and until then nothing is admitted."
    ),
    "Coordinator.lose_prefill.from.reserving:drop": (
        "Taken once D's reply has come, which a living D sends; the order to a dead P goes nowhere."
    ),
    "Coordinator.lose_prefill.from.received:drop": (
        "Taken once D has activated or finished. D has all it needs of P, so that nothing waits for it."
    ),
    "Coordinator.lose_prefill.from.decoding:drop": (
        "Taken once D has finished. D has all it needs of P, so that nothing waits for it."
    ),
    "Coordinator.lose_prefill[first_time]:delete": (
        "The second time sets what is set. Cancellation takes it at most once more, as a death after a cancel: D "
        "closes an endpoint through which nothing comes."
    ),
    "Coordinator.lose_prefill.set.prefill_lost:*": "As without 'first_time': only that guard reads the variable.",
    "Coordinator.lose_prefill.set.compute_held:*": (
        "P is dead, and with it the compute that the credit stands for; no request is admitted to it again."
    ),
    "Coordinator.lose_decode@prefilling+*.from.prefilling:drop": (
        "Taken after P's commit, or after a cancel: P works on for nothing until then, and can always come there."
    ),
    "Coordinator.lose_decode@prefilling+*[first_time]:delete": (
        "The second time sets what is set; Cancellation and Credits ignore it."
    ),
    "Coordinator.lose_decode@*.set.decode_lost:*": (
        "As without 'first_time': only that guard reads the variable, and a second time sets what is set."
    ),
    # -- Cancellation --------------------------------------------------------------------------------------------
    "Cancellation.cancel@idle/holds_nothing.to:stay": (
        "The record retires by the same event; nothing looks at Cancellation again."
    ),
    "Cancellation.cancel@idle/p_never_started.to:stay": (
        "The record is closing, and from 'idle' what comes later is ignored. All that 'safe' adds is a fence if P "
        "dies, and P has written nothing."
    ),
    "Cancellation.cancel@idle/d_has_all.to:stay": (
        "The record is closing, and from 'idle' what comes later is ignored. All that 'safe' adds is a fence if P "
        "dies, and P's writes have all landed."
    ),
    "Cancellation.lose_prefill@idle/p_never_started.from.idle:drop": (
        "Taken after D's reply, when P may have begun for all that is known: D is fenced for nothing, and settles."
    ),
    "Cancellation.lose_prefill@idle/*.to:stay": (
        "The same event sets 'prefill_lost', so that it does not come again, and the record is closing: all else "
        "is ignored in both states."
    ),
    "Cancellation.lose_prefill@idle/d_has_all.from.idle:drop": (
        "Taken once D has finished. D has all it needs of P, so that nothing waits for it."
    ),
    "Cancellation.lose_prefill@idle/d_has_all[d_has_all]:Coordinator.state-*": (
        "Taken in the next state. D has all it needs of P, so that nothing waits for it."
    ),
    "Cancellation.lose_prefill@idle/d_has_all.send.decode.cancel:drop": (
        "D has all it needs of P: it finishes on its own, which ends the generation as well."
    ),
    "Cancellation.lose_prefill@requested.to:stay": (
        "The same event sets 'prefill_lost', so that D is fenced once; what P said last only tells D a count that "
        "it no longer needs."
    ),
    "Cancellation.lose_prefill@safe.to:stay": (
        "The same event sets 'prefill_lost', so that D is fenced once; all else is ignored in both states."
    ),
    "Cancellation.lose_decode@idle/p_works[p_works]:Coordinator.state-prefilling": (
        "Taken after P's commit, or after a cancel: P works on for nothing until then, and can always come there."
    ),
    "Cancellation.lose_decode@idle/p_works.to:stay": (
        "The record is closing, so that a cancel is ignored in both states; what 'requested' would say to D, a "
        "dead D does not need."
    ),
    "Cancellation.lose_decode@requested+safe+fenced.from.requested:drop": (
        "Taken once P has released its storage, which it was told to do."
    ),
    # -- Workers -------------------------------------------------------------------------------------------------
    "Export.*.do.drop_unposted:drop": (
        "It frees what the shell keeps for later posts; the table refuses every post from 'over', so that a shell "
        "that kept it could not use it."
    ),
    "Export.handle_error@computing+submitted.to:stay": (
        "The same event quarantines the domain, which ends posting, and then the worker: the record ends by P's death."
    ),
    "SourceRetirement.handle_error@held+retiring.to:stay": (
        "The failed handle is still counted, and a count above zero keeps the storage from settling as the state does."
    ),
    "Import.receive@over[awaited]:delete": (
        "It comes again until the storage settles, and sets what is set. That it is awaited spares the shell the turns."
    ),
    "Import.*.do.remove_request:drop": (
        "It takes the request off the shell's batch; the table refuses every step from 'over', so that a shell "
        "that kept it could not run it."
    ),
    "DestinationRetirement.receive.from.fencing:drop": (
        "The fence, which is under way, says the same: no writer is left."
    ),
    # -- What a shell asks before it offers an action ------------------------------------------------------------
    "actions.prefill_connected[*]:decode_worker.state-ready": (
        "P connects after D has: one of the two must not wait for the other, and D does not."
    ),
    "actions.decode_connected[*]:prefill_worker.state-ready": (
        "D connects after P has: one of the two must not wait for the other, and P does not."
    ),
    "actions.prefill_connected[*]:decode_worker.state+failed": (
        "P connects to a D that is known to be dead: intake is closed already, so that nothing is admitted."
    ),
    "actions.decode_connected[*]:prefill_worker.state+failed": (
        "D connects to a P that is known to be dead: intake is closed already, so that nothing is admitted."
    ),
    "actions.drain_prefill[*]:decode_worker.state+fail*": (
        "D is failing or dead, so that the engine closes without its operator, whose drain need not come at all."
    ),
    "actions.drain_decode[*]:prefill_worker.state+*": (
        "D is drained when P has ended, and not already when P begins to end; P ends."
    ),
}


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is as the pattern says. Only `*` means something else than itself."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def reason_for(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that fits a mutant, or None."""
    return next((pattern for pattern in patterns if matches(pattern, name)), None)
