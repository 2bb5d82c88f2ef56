"""A machine of the spec as a `transitions.Machine`: a second interpreter, and a place for people's own callbacks.

    machine = to_transitions(spec.machines["PrefillWorker"], model=mine, siblings={"credits": {"live": 0}})
    mine.is_ready()          # mine.on_enter_ready, machine.on_enter_ready(..), before/after callbacks as usual
    machine.fire("fatal")    # -> (Effect("terminate_prefill"),)

Guards and updates go through the reference reading of the syntax tree (`expr.evaluate`), and which row fires is
left to the library: nothing is shared with `compile.py` but the shape of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transitions

from rlt_fsm.compile import Effect, Message, Outputs, shown_values
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import Enum, Node, Ref, evaluate, show
from rlt_fsm.model import Ignore, Machine, Transition

Value = bool | int | str
Siblings = Mapping[str, Mapping[str, Value]]


class Model:
    """What carries the state where the caller has no object of their own."""

    state: str


class SpecMachine(transitions.Machine):
    """`transitions.Machine` over one machine of a spec.

    `variables` holds its variables and givens by name; `siblings` is read anew at each event; `outputs` is what
    the last event sent and did. Callbacks get the library's EventData: the event's fields are in its `kwargs`.
    A variable is updated after the `before` callbacks and before `on_exit`; where a callback raises, the library
    gives no undo. An event that is refused raises IllegalEvent from the trigger, before any callback but `prepare`.
    """

    def __init__(self, spec: Machine, model: Any, given: Mapping[str, int], siblings: Siblings, **options: Any) -> None:
        self.spec = spec
        self.siblings = siblings
        self.outputs: Outputs = ()
        self.variables: dict[str, Any] = dict(given)
        for var in spec.vars.values():
            self.variables[var.name] = evaluate(var.init, lambda ref: given[ref.name])
        options = {"initial": spec.initial, "auto_transitions": False, "send_event": True, **options}
        super().__init__(model=model, states=list(spec.states), **options)
        for event in spec.events():
            if event in vars(model) and event.removeprefix("is_") in spec.states:
                delattr(model, event)  # an event named as the library's test of a state, such as `is_ready`, goes first
        for event in spec.events():
            for state in spec.states:
                for row in spec.rows(event, state):
                    self.add_transition(
                        event,
                        state,
                        row.target,
                        conditions=[self._guard(row)],
                        before=[self._update(row)],
                    )
                for ignored in spec.ignored(event, state):
                    self.add_transition(event, state, None, conditions=[self._guard(ignored)], before=[self._nothing])
                self.add_transition(event, state, None, conditions=[self._refuse(event)])

    def fire(self, event: str, **fields: Value) -> Outputs:
        """Move the model by an event given by its name; return what it sends and does, in order.

        Raises IllegalEvent where the state has no row that holds, LookupError for an event it does not have.
        """
        if event not in self.spec.events():
            raise LookupError(f"machine '{self.spec.name}' has no event '{event}'; {', '.join(self.spec.events())}")
        model: Any = self.models[0]
        model.trigger(event, **fields)
        return self.outputs

    def values(self) -> dict[str, Value]:
        """Every variable by its flat name, as the compiled classes give them."""
        model: Any = self.models[0]
        out: dict[str, Value] = {f"{self.spec.name}.state": model.state}
        for var in self.spec.vars.values():
            value = self.variables[var.name]
            out[f"{self.spec.name}.{var.name}"] = var.type.names[value] if isinstance(var.type, Enum) else value
        return out

    # -- what the library calls -----------------------------------------------------------------------

    def _reading(self, data: transitions.EventData) -> Callable[[Ref], Any]:
        model: Any = data.model

        def value(ref: Ref) -> Any:
            if ref.field:
                found: Any = self.siblings[ref.name][ref.field]
            elif ref.name == "state":
                found = model.state
            elif ref.name in self.variables:
                found = self.variables[ref.name]
            else:
                found = data.kwargs[ref.name]
            if isinstance(ref.type, Enum) and isinstance(found, str):
                return ref.type.names.index(found)
            return found

        return value

    def _guard(self, row: Transition | Ignore) -> Callable[[transitions.EventData], bool]:
        def holds(data: transitions.EventData) -> bool:
            value = self._reading(data)
            return all(evaluate(node, value) for node in row.when.values())

        return holds

    def _update(self, row: Transition) -> Callable[[transitions.EventData], None]:
        def update(data: transitions.EventData) -> None:
            value = self._reading(data)
            outputs: list[Message | Effect] = []
            for send in row.send:
                fields = {name: evaluate(node, value) for name, node in send.fields.items()}
                outputs.append(Message(send.to, send.message, fields))
            outputs += [Effect(name) for name in row.do]
            new = {name: evaluate(node, value) for name, node in row.set.items()}
            self.variables.update(new)
            self.outputs = tuple(outputs)

        return update

    def _nothing(self, data: transitions.EventData) -> None:
        self.outputs = ()

    def _refuse(self, event: str) -> Callable[[transitions.EventData], bool]:
        """The condition of the row that is tried last: raises, with what was false before it."""

        def refuse(data: transitions.EventData) -> bool:
            model: Any = data.model
            state, value = model.state, self._reading(data)
            detail: list[str] = []
            rows: list[Transition | Ignore] = [*self.spec.rows(event, state), *self.spec.ignored(event, state)]
            for row in rows:
                detail += [_false(label, node, value) for label, node in row.when.items() if not evaluate(node, value)]
            raise IllegalEvent(self.spec.name, event, {self.spec.name: state}, tuple(detail))

        return refuse


def _false(label: str, node: Node, value: Callable[[Ref], Any]) -> str:
    return f"{label} is false: {show(node)}{shown_values(node, value)}"


def to_transitions(
    machine: Machine,
    model: Any = None,
    given: Mapping[str, int] | None = None,
    siblings: Siblings | None = None,
    **options: Any,
) -> SpecMachine:
    """The machine as a `transitions.Machine` that moves `model` (a new `Model` where there is none).

    given: the machine's givens. siblings: alias -> variable -> value (a state by its name), for what its guards
    read; the mapping is kept, so that its owner may keep it true. options: as `transitions.Machine` takes them,
    such as `after_state_change`. Raises ValueError for a given or a sibling that is missing or unknown.
    """
    given, siblings = dict(given or {}), {} if siblings is None else siblings
    if set(given) != set(machine.given):
        raise ValueError(f"machine '{machine.name}' takes givens {_listed(machine.given)}, not {_listed(given)}")
    if not set(machine.reads) <= set(siblings):
        raise ValueError(f"machine '{machine.name}' reads {_listed(machine.reads)}; siblings has {_listed(siblings)}")
    return SpecMachine(machine, Model() if model is None else model, given, siblings, **options)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "(none)"
