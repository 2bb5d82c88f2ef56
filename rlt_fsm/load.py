"""Spec files to the model. Every value keeps its line; the first mistakes are shown where they stand.

The reading goes in three passes: the raw tree against the schema, the symbols of every machine, then
the expressions, each in the scope of what its writer may know. Guards see their own machine, the
siblings it declares under `reads`, and the fields of the event: the world is out of their reach.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlt_fsm import model
from rlt_fsm.errors import Finding, Span, SpecError, suggest
from rlt_fsm.expr import (
    BOOL,
    FALSE,
    INT,
    NONE_VALUE,
    TRUE,
    Const,
    Enum,
    Node,
    Ref,
    Scope,
    Seen,
    Symbol,
    Type,
    conj,
    parse,
)
from rlt_fsm.load_yaml import Raw, read_documents
from rlt_fsm.schema import check_kind, spec_directory


def load(paths: Sequence[str | Path] | None = None) -> model.Spec:
    """Read spec files or directories of them; the shipped spec where `paths` is None.

    A machine that a file only reads is looked up in the other files of the same directory.
    Raises SpecError with every finding, each at its line.
    """
    return _Loader().load([Path(p) for p in paths] if paths else [spec_directory()])


def _files(paths: Iterable[Path]) -> list[Path]:
    out: list[Path] = []
    for path in paths:
        if path.is_dir():
            out.extend(sorted(p for p in path.glob("*.yaml") if p.name != "schema.yaml"))
        else:
            out.append(path)
    return out


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return f"{path.parent.name}/{path.name}"


QUESTIONS = ("always", "sometimes", "possible", "leads_to", "rests")  # of which a property has one


class _Loader:
    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.sources: dict[str, str] = {}
        self.raw_machines: dict[str, Raw] = {}
        self.raw_systems: list[Raw] = []
        self.types: dict[str, dict[str, Type]] = {}  # machine -> state and variables
        self.hidden: dict[str, str] = {}  # names of the world, which no guard may read

    def error(self, kind: str, message: str, span: Span, hint: str = "") -> None:
        self.findings.append(Finding(kind, message, span, hint))

    def stop_if_wrong(self) -> None:
        if self.findings:
            raise SpecError(self.findings, self.sources)

    def load(self, paths: list[Path]) -> model.Spec:
        files = _files(paths)
        if not files:
            raise SpecError(
                [Finding("no-spec", "no .yaml file here", Span(str(paths[0]), 1, 1), "name a spec file or directory")]
            )
        for path in files:
            self.read(path)
        siblings = [s for folder in dict.fromkeys(p.parent for p in files) for s in _files([folder]) if s not in files]
        while True:  # what is read may read others in turn
            wanted = {raw.text for machine in self.raw_machines.values() for _, raw in machine.pairs("reads")}
            known = set(self.raw_machines)
            if not wanted <= known:
                for sibling in siblings:
                    self.read(sibling, only=wanted - known)
            if known == set(self.raw_machines):
                break
        self.stop_if_wrong()
        for raw in self.raw_systems:
            for key, _ in raw.pairs("world"):
                self.hidden[key] = f"'{key}' is a fact of the world, which no process can read in a guard or update"
        for name, raw in self.raw_machines.items():
            self.declare(name, raw)
        for raw in self.raw_machines.values():
            for _, word in raw.pairs("reads"):
                if word.text not in self.types:
                    hint = suggest(word.text, self.types)
                    self.error("unknown-machine", f"'{word.text}' is not a machine", word.span, hint)
        self.stop_if_wrong()
        machines = {name: self.machine(name, raw) for name, raw in self.raw_machines.items()}
        self.stop_if_wrong()
        system = None
        if self.raw_systems:
            if len(self.raw_systems) > 1:
                word = self.raw_systems[1].entries["system"]
                self.error("duplicate-system", "there is another system already", word.span, "drop one of them")
            self.stop_if_wrong()
            reader = _SystemReader(self, self.raw_systems[0], machines)
            self.stop_if_wrong()
            system = reader.read()
        self.stop_if_wrong()
        digest = hashlib.sha256()
        for name in sorted(self.sources):
            digest.update(Path(name).name.encode() + b"\0" + self.sources[name].encode() + b"\0")
        return model.Spec(machines, system, dict(self.sources), digest.hexdigest())

    def read(self, path: Path, only: set[str] | None = None) -> None:
        """Read one file; with `only`, keep just those machines of it (and nothing where it has none)."""
        shown = _shown(path)
        found: list[Finding] = []  # what is wrong with a file that is only looked into is not this spec's business
        try:
            text, documents = read_documents(path, shown, found)
        except SpecError as error:
            self.sources.update(error.sources)
            if only is None:
                self.findings.extend(error.findings)
            return
        if only is not None and not any(d.word("machine") in only for d in documents if d.kind == "map"):
            return
        self.sources[shown] = text
        self.findings.extend(found)
        if not documents:
            self.error("no-spec", "the file holds no machine and no system", Span(shown, 1, 1), "start with 'machine:'")
        for raw in documents:
            if raw.kind != "map" or not ({"machine", "system"} & set(raw.entries)):
                self.error(
                    "wrong-type", "a document must start with 'machine:' or 'system:'", raw.span, "separate with ---"
                )
                continue
            kind = "machine" if "machine" in raw.entries else "system"
            name = raw.word(kind)
            if only is not None and (kind == "system" or name not in only):
                continue
            if not check_kind(raw, kind, f"{kind} '{name}'", self.findings):
                continue
            if kind == "system":
                self.raw_systems.append(raw)
            elif name in self.raw_machines:
                first = self.raw_machines[name].span
                place = raw.entries[kind].span
                self.error("duplicate-machine", f"machine '{name}' stands also at {first}", place, "rename one of them")
            else:
                self.raw_machines[name] = raw

    # -- machines -----------------------------------------------------------------------------------

    def declare(self, name: str, raw: Raw) -> None:
        """Note the types of a machine's state and variables, so that others can read them."""
        states = tuple(state for state, _ in raw.pairs("states"))
        types: dict[str, Type] = {"state": Enum(f"{name} state", states)}
        per = raw.get("per")
        if per is not None and per.text != "generation":
            self.error("unknown-value", f"'{per.text}' is not what a machine can be per", per.span, "known: generation")
        for given in raw.entries["given"].entries if raw.get("given") else ():
            self.fresh(given, types, raw.entries["given"].keys[given], name)
            types[given] = INT
        for var, value in raw.pairs("vars"):
            self.fresh(var, types, raw.entries["vars"].keys[var], name)
            types[var] = self.var_type(value, f"{name}.{var}")
            if var in states:
                self.error(
                    "name-clash",
                    f"'{var}' is a state and a variable of '{name}'",
                    raw.entries["vars"].keys[var],
                    "rename the variable",
                )
        self.types[name] = types

    def fresh(self, word: str, types: dict[str, Type], span: Span, machine: str) -> None:
        if word in types:
            self.error("name-clash", f"'{word}' is declared twice in machine '{machine}'", span, "rename one of them")

    def var_type(self, raw: Raw, label: str) -> Type:
        kind = raw.word("type")
        if kind == "bool":
            return BOOL
        if kind == "counter":
            return INT
        if kind == "seen":
            return Seen()
        if kind == "enum":
            values = tuple(v.text for v in raw.words("values"))
            if not values:
                self.error("missing-key", f"enum '{label}' needs 'values'", raw.span, "values: [first, second]")
            return Enum(label, values)
        span = raw.entries["type"].span
        self.error("unknown-type", f"'{kind}' is not a type", span, suggest(kind, ("bool", "counter", "enum", "seen")))
        return BOOL

    def default(self, type_: Type) -> Node:
        return FALSE if type_ == BOOL else Const(0, type_)

    def machine(self, name: str, raw: Raw) -> model.Machine:
        types = self.types[name]
        span = raw.entries["machine"].span
        reads: dict[str, str] = {}
        fields: dict[str, tuple[tuple[str, ...], dict[str, Symbol]]] = {}
        for alias, target in raw.pairs("reads"):
            reads[alias] = target.text
            fields[alias] = ((), {k: Symbol(t) for k, t in self.types[target.text].items()})
        names = {k: Symbol(t) for k, t in types.items()}
        given = {
            key: model.Variable(
                key, "counter", INT, Const(0, INT), value.word("doc"), span=raw.entries["given"].keys[key]
            )
            for key, value in raw.pairs("given")
        }
        init_scope = Scope({k: Symbol(INT) for k in given})
        variables: dict[str, model.Variable] = {}
        for key, value in raw.pairs("vars"):
            type_ = types[key]
            first = value.get("init")
            init = self.default(type_) if first is None else self.expr(first, init_scope, type_)
            variables[key] = model.Variable(
                key, value.word("type"), type_, init, value.word("doc"), span=raw.entries["vars"].keys[key]
            )
        states: dict[str, model.State] = {}
        for key, value in raw.pairs("states"):
            states[key] = model.State(
                key,
                value.word("doc"),
                value.word("initial") == "true",
                value.word("final") == "true",
                value.word("milestone"),
                raw.entries["states"].keys[key],
            )
        initials = [s for s in states.values() if s.initial]
        if len(initials) != 1:
            self.error(
                "initial-state",
                f"machine '{name}' has {len(initials)} initial states",
                raw.entries["states"].span,
                "mark exactly one with {initial: true}",
            )
        takes: dict[str, dict[str, model.Variable]] = {}
        for event, value in raw.pairs("takes"):
            takes[event] = {}
            for key, decl in value.entries.items():
                kind = decl.word("type")
                self.fresh(key, types, value.keys[key], name)
                if kind not in ("bool", "counter", "index"):
                    self.error(
                        "unknown-type",
                        f"'{kind}' is not a field type",
                        decl.entries["type"].span,
                        suggest(kind, ("bool", "counter", "index")),
                    )
                type_ = BOOL if kind == "bool" else INT
                span_ = value.keys[key]
                takes[event][key] = model.Variable(key, kind, type_, self.default(type_), decl.word("doc"), span=span_)
        transitions: list[model.Transition] = []
        for place, row in enumerate(raw.entries["transitions"].items):
            transitions.append(self.transition(name, place, row, names, fields, states, takes, types))
        ignores: list[model.Ignore] = []
        if raw.get("ignore") is not None:
            for row in raw.entries["ignore"].items:
                event = row.word("on")
                scope = self.scope(names, takes.get(event, {}), fields)
                ignores.append(
                    model.Ignore(
                        event, self.states(row, "from", states, name), row.word("why"), self.guard(row, scope), row.span
                    )
                )
        return model.Machine(
            name,
            raw.word("doc"),
            states,
            variables,
            given,
            takes,
            reads,
            tuple(transitions),
            tuple(ignores),
            raw.word("per"),
            raw.word("source"),
            span,
        )

    def scope(
        self,
        names: dict[str, Symbol],
        takes: dict[str, model.Variable],
        fields: dict[str, tuple[tuple[str, ...], dict[str, Symbol]]],
    ) -> Scope:
        """What a row may read: its machine, its declared siblings, the fields of its event."""
        known = {**names, **{key: Symbol(v.type) for key, v in takes.items()}}
        hidden = {name: why for name, why in self.hidden.items() if name not in known and name not in fields}
        return Scope(known, fields, hidden=hidden)

    def states(self, row: Raw, key: str, states: dict[str, model.State], machine: str) -> tuple[str, ...]:
        out: list[str] = []
        for word in row.words(key):
            if word.text not in states:
                self.error(
                    "unknown-state",
                    f"'{word.text}' is not a state of machine '{machine}'",
                    word.span,
                    suggest(word.text, states),
                )
            elif word.text in out:
                self.error("duplicate-state", f"'{word.text}' stands twice in this row", word.span, "name it once")
            else:
                out.append(word.text)
        return tuple(out)

    def guard(self, row: Raw, scope: Scope) -> dict[str, Node]:
        return {label: self.expr(value, scope, BOOL) for label, value in row.pairs("when")}

    def transition(
        self,
        machine: str,
        place: int,
        row: Raw,
        names: dict[str, Symbol],
        fields: dict[str, tuple[tuple[str, ...], dict[str, Symbol]]],
        states: dict[str, model.State],
        takes: dict[str, dict[str, model.Variable]],
        types: dict[str, Type],
    ) -> model.Transition:
        event = row.word("on")
        scope = self.scope(names, takes.get(event, {}), fields)
        sources = self.states(row, "from", states, machine)
        target = self.states(row, "to", states, machine)
        for source in sources:
            if states[source].final and (row.get("to") is not None and target and target[0] != source):
                self.error(
                    "leaves-final",
                    f"'{source}' is final, yet this row leaves it",
                    row.entries["from"].span,
                    "drop 'final' from the state or the state from the row",
                )
        updates: dict[str, Node] = {}
        for var, value in row.pairs("set"):
            if var not in types or var == "state":
                own = [k for k in types if k != "state"]
                self.error(
                    "unknown-variable",
                    f"machine '{machine}' has no variable '{var}' to set",
                    row.entries["set"].keys[var],
                    suggest(var, own),
                )
                continue
            updates[var] = self.expr(value, scope, types[var])
        sends: list[model.Send] = []
        send = row.get("send")
        if send is not None:
            sends = self.sends(send, scope)
        return model.Transition(
            machine,
            place,
            event,
            sources,
            target[0] if target else None,
            self.guard(row, scope),
            updates,
            tuple(sends),
            tuple(word.text for word in row.words("do")),
            row.word("doc"),
            row.span,
        )

    def sends(self, raw: Raw, scope: Scope) -> list[model.Send]:
        out: list[model.Send] = []
        if raw.kind != "map":
            self.error("wrong-type", "'send' must be a mapping", raw.span, "send: {process: message}")
            return out
        for to, value in raw.entries.items():
            for item in value.items if value.kind == "list" else [value]:
                if item.kind == "scalar":
                    out.append(model.Send(to, item.text, {}, item.span))
                elif item.kind == "map":
                    for message, fields in item.entries.items():
                        if fields.kind != "map":
                            self.error(
                                "wrong-type",
                                f"the fields of '{message}' must be a mapping",
                                fields.span,
                                "write {message: {field: value}}, or the message alone if it has no fields",
                            )
                        values = {k: self.expr(v, scope, None) for k, v in fields.entries.items()}
                        out.append(model.Send(to, message, values, item.keys[message]))
                else:
                    self.error("wrong-type", "a message is a name, or a name with fields", item.span)
        return out

    def expr(self, raw: Raw, scope: Scope, want: Type | None) -> Node:
        """Read one expression; a mistake becomes a finding and FALSE stands in, so that reading goes on."""
        if raw.kind != "scalar":
            self.error("wrong-type", "an expression is a line of text", raw.span, "quote it if it holds ': ' or ', '")
            return FALSE
        try:
            return parse(raw.text, scope, raw.span, want)
        except SpecError as error:
            self.findings.extend(error.findings)
            return FALSE


class _SystemReader:
    """The second half: the system document, whose expressions may see everything."""

    def __init__(self, loader: _Loader, raw: Raw, machines: dict[str, model.Machine]) -> None:
        self.loader = loader
        self.raw = raw
        self.machines = machines
        self.sorts = tuple(key for key, _ in raw.pairs("instances"))
        gens = [key for key, value in raw.pairs("instances") if value.word("of") == "generation"]
        if len(gens) != 1:
            loader.error(
                "no-generation", "exactly one instance sort must be 'of: generation'", raw.entries["instances"].span
            )
        self.gen = gens[0] if gens else ""

    def known(self, word: Raw, names: Iterable[str], kind: str) -> bool:
        names = list(names)
        if word.text not in names:
            self.loader.error(f"unknown-{kind}", f"'{word.text}' is not a {kind}", word.span, suggest(word.text, names))
            return False
        return True

    def read(self) -> model.System | None:
        raw, loader = self.raw, self.loader
        for kind in ("processes", "channels", "world", "actions"):
            for _, value in raw.pairs(kind):
                for word in value.words("per"):
                    self.known(word, self.sorts, "sort")
        self.distinct()
        consts = {key: value.text for key, value in raw.pairs("consts")}
        const_names = {key: Symbol(INT) for key in consts}
        world: dict[str, model.Variable] = {}
        for key, value in raw.pairs("world"):
            kind = value.word("type")
            if kind not in ("bool", "counter", *self.sorts):
                loader.error(
                    "unknown-type",
                    f"'{kind}' is not a type of the world",
                    value.entries["type"].span,
                    suggest(kind, ("bool", "counter", *self.sorts)),
                )
            type_ = BOOL if kind == "bool" else INT
            first = value.get("init")
            default: Node = FALSE if kind == "bool" else Const(NONE_VALUE if kind in self.sorts else 0, INT)
            init = default if first is None else loader.expr(first, Scope(const_names), type_)
            per = tuple(w.text for w in value.words("per"))
            world[key] = model.Variable(key, kind, type_, init, value.word("doc"), per, raw.entries["world"].keys[key])
        names = {**const_names, **{k: Symbol(v.type, v.per) for k, v in world.items()}}
        processes = self.processes(world, const_names)
        channels = self.channels(processes)
        fields: dict[str, tuple[tuple[str, ...], dict[str, Symbol]]] = {}
        for process in processes.values():
            for name in process.machines:
                fields[name] = ((self.gen,), {k: Symbol(t) for k, t in loader.types[name].items()})
            for shared in process.shared.values():
                fields[shared.name] = ((), {k: Symbol(t) for k, t in loader.types[shared.machine].items()})
        for channel in channels.values():
            members: dict[str, Symbol] = {m: Symbol(BOOL) for m in channel.messages}
            for message in channel.messages:
                for field in self.message_fields(processes, channel, message):
                    members[f"{message}_{field}"] = Symbol(INT)
            fields[channel.name] = ((channel.per,) if channel.per else (), members)
        self.names, self.fields = names, fields
        effects = {key: self.effect(key, value) for key, value in raw.pairs("effects")}
        actions = {key: self.action(key, value, processes) for key, value in raw.pairs("actions")}
        properties = [self.prop(key, value) for key, value in raw.pairs("properties")]
        scope = self.scope()
        for key, value in raw.pairs("lemmas"):
            formula = loader.expr(value.entries["holds"], scope, BOOL)
            properties.append(
                model.Property(key, "lemma", formula, None, value.word("serves"), span=raw.entries["lemmas"].keys[key])
            )
        names_seen: dict[str, Span] = {}
        for item in properties:
            if item.name in names_seen:
                loader.error("duplicate-key", f"'{item.name}' names two properties", item.span, "rename one of them")
            names_seen[item.name] = item.span
        scopes = {key: self.scope_def(key, value, consts, processes) for key, value in raw.pairs("scopes")}
        standalone: list[str] = []
        for word in raw.words("standalone"):
            if self.known(word, self.machines, "machine"):
                standalone.append(word.text)
        return model.System(
            raw.word("system"),
            raw.word("doc"),
            {key: value.word("of") for key, value in raw.pairs("instances")},
            self.gen,
            consts,
            processes,
            channels,
            world,
            effects,
            actions,
            tuple(properties),
            scopes,
            self.machines,
            tuple(standalone),
            raw.span,
        )

    def distinct(self) -> None:
        """Refuse one name for two things that an expression of the system may name."""
        seen: dict[str, str] = {}
        places = [
            (word, span, what)
            for what, key in (
                ("an instance sort", "instances"),
                ("a constant", "consts"),
                ("a world variable", "world"),
            )
            for word, span in (self.raw.entries[key].keys.items() if self.raw.get(key) else ())
        ]
        places += [
            (word, span, "a channel")
            for word, span in (self.raw.entries["channels"].keys.items() if self.raw.get("channels") else ())
        ]
        for _, process in self.raw.pairs("processes"):
            places += [(word.text, word.span, "a machine") for word in process.words("machines")]
            shared = process.get("shared")
            places += [(word, span, "a shared instance") for word, span in (shared.keys.items() if shared else ())]
        for word, span, what in places:
            if word in seen and not (what == "a machine" and seen[word] == what):
                self.loader.error("name-clash", f"'{word}' is {seen[word]} and {what}", span, "rename one of them")
            seen.setdefault(word, what)

    def once(self, words: Sequence[Raw], what: str) -> None:
        """Refuse a list that names something twice."""
        seen: set[str] = set()
        for word in words:
            if word.text in seen:
                self.loader.error(
                    "duplicate-name", f"'{word.text}' stands twice among {what}", word.span, "name it once"
                )
            seen.add(word.text)

    def given(self, raw: Raw, machines: Sequence[str], scope: Scope, what: str, span: Span) -> dict[str, Node]:
        """The numbers that instances are made with: every one that their machines need, and no other."""
        need = {name for machine in machines for name in self.machines[machine].given}
        out: dict[str, Node] = {}
        for key, value in raw.pairs("given"):
            if key not in need:
                place = raw.entries["given"].keys[key]
                self.loader.error(
                    "unknown-name", f"'{key}' is not a given of {what}", place, suggest(key, sorted(need))
                )
                continue
            out[key] = self.loader.expr(value, scope, INT)
        for key in sorted(need - set(out)):
            if not any(key == k for k, _ in raw.pairs("given")):
                self.loader.error("missing-given", f"{what} needs '{key}'", span, "given: {" + key + ": '1'}")
        return out

    def scope(self, binders: Sequence[str] = ()) -> Scope:
        return Scope({**self.names, **{b: Symbol(INT) for b in binders}}, self.fields, self.sorts)

    def processes(self, world: dict[str, model.Variable], consts: dict[str, Symbol]) -> dict[str, model.Process]:
        loader, out = self.loader, {}
        world_scope = Scope({k: Symbol(v.type, v.per) for k, v in world.items()}, sorts=self.sorts)
        const_scope = Scope(consts)
        for key, value in self.raw.pairs("processes"):
            machines = [w.text for w in value.words("machines") if self.known(w, self.machines, "machine")]
            self.once(value.words("machines"), f"the machines of '{key}'")
            for word in value.words("machines"):
                if word.text in self.machines and not self.machines[word.text].per:
                    self.loader.error(
                        "wrong-place",
                        f"'{word.text}' is not per generation",
                        word.span,
                        "put it under 'shared', or give the machine 'per: generation'",
                    )
            shared: dict[str, model.Shared] = {}
            for name, item in value.pairs("shared"):
                machine = item.entries["machine"]
                if self.known(machine, self.machines, "machine"):
                    if self.machines[machine.text].per:
                        self.loader.error(
                            "wrong-place",
                            f"'{machine.text}' is per generation, so it cannot be shared",
                            machine.span,
                            "put it under 'machines', or drop 'per' from the machine",
                        )
                    given = self.given(item, [machine.text], const_scope, f"shared instance '{name}'", machine.span)
                    shared[name] = model.Shared(name, machine.text, given, item.span)
            alive = value.get("alive")
            given = self.given(
                value, machines, const_scope, f"process '{key}'", self.raw.entries["processes"].keys[key]
            )
            out[key] = model.Process(
                key,
                tuple(machines),
                shared,
                None if alive is None else loader.expr(alive, world_scope, BOOL),
                given,
                value.word("doc"),
                self.raw.entries["processes"].keys[key],
            )
        return out

    def channels(self, processes: dict[str, model.Process]) -> dict[str, model.Channel]:
        out: dict[str, model.Channel] = {}
        ways: dict[tuple[str, str, str], str] = {}
        for key, value in self.raw.pairs("channels"):
            self.known(value.entries["from"], processes, "process")
            known = self.known(value.entries["to"], processes, "process")
            deliver, per = value.get("deliver"), value.get("per")
            if deliver is not None and known:
                self.known(deliver, processes[value.word("to")].shared, "instance")
            if per is not None and per.text in self.sorts and per.text != self.gen:
                self.loader.error(
                    "unknown-sort", f"a channel can be per '{self.gen}' only, not per '{per.text}'", per.span
                )
            if per is None and deliver is None:
                self.loader.error(
                    "missing-key",
                    f"channel '{key}' needs 'per' or 'deliver'",
                    self.raw.entries["channels"].keys[key],
                    f"per: {self.gen or 'r'} for messages of one generation, deliver: NAME for a shared instance",
                )
            self.once(value.words("messages"), f"the messages of '{key}'")
            for word in value.words("messages"):
                way = (value.word("from"), value.word("to"), word.text)
                if ways.setdefault(way, key) != key:
                    self.loader.error(
                        "duplicate-name",
                        f"'{word.text}' goes from '{way[0]}' to '{way[1]}' on '{ways[way]}' too",
                        word.span,
                        "a message has one channel between two processes",
                    )
            out[key] = model.Channel(
                key,
                value.word("from"),
                value.word("to"),
                value.word("per"),
                tuple(w.text for w in value.words("messages")),
                value.word("deliver"),
                value.word("doc"),
                self.raw.entries["channels"].keys[key],
            )
        return out

    def message_fields(
        self, processes: dict[str, model.Process], channel: model.Channel, message: str
    ) -> dict[str, None]:
        """The fields a message carries: whatever the receiving machines take with it."""
        out: dict[str, None] = {}
        target = processes.get(channel.target)
        for name in target.machines if target else ():
            for field in self.machines[name].takes.get(message, {}):
                out[field] = None
        return out

    def assignments(self, raw: Raw, scope: Scope, need: Node | None = None) -> tuple[model.Assignment, ...]:
        loader = self.loader
        over: tuple[str, ...] = tuple(w.text for w in raw.words("for") if self.known(w, self.sorts, "sort"))
        inner = Scope({**scope.names, **{s: Symbol(INT) for s in over}}, scope.fields, self.sorts)
        pairs: list[tuple[Node, Node]] = []
        mapping = raw.get("set")
        if mapping is not None:
            for text, value in mapping.entries.items():
                target = loader.expr(Raw("scalar", mapping.keys[text], text), inner, None)
                if not isinstance(target, Ref) or target.field or target.name not in self.names:
                    loader.error("bad-target", f"'{text}' is not a world variable", mapping.keys[text])
                    continue
                pairs.append((target, loader.expr(value, inner, target.type)))
        when = raw.get("when")
        test = TRUE if when is None or need is not None else loader.expr(when, inner, BOOL)
        return (model.Assignment(over, conj(test, need or TRUE), tuple(pairs)),) if pairs else ()

    def effect(self, key: str, raw: Raw) -> model.Effect:
        choose = raw.word("choose")
        if choose and not self.known(raw.entries["choose"], self.sorts, "sort"):
            choose = ""
        binders = [self.gen, *([choose] if choose else [])]
        scope = self.scope(binders)
        needs = raw.get("needs")
        return model.Effect(
            key,
            choose,
            TRUE if needs is None else self.loader.expr(needs, scope, BOOL),
            self.assignments(raw, scope),
            raw.word("doc"),
            self.raw.entries["effects"].keys[key],
        )

    def action(self, key: str, raw: Raw, processes: dict[str, model.Process]) -> model.Action:
        loader = self.loader
        per = tuple(w.text for w in raw.words("per"))
        scope = self.scope(per)
        when = raw.get("when")
        process, event = "", ""
        if raw.get("event") is not None:
            process, _, event = raw.word("event").partition(".")
            if process not in processes or not event:
                loader.error(
                    "unknown-process",
                    f"'{raw.word('event')}' does not name an event of a process",
                    raw.entries["event"].span,
                    f"write process.event; processes: {', '.join(processes)}",
                )
                process = ""
        fields: dict[str, tuple[str | Node, ...]] = {}
        for name, value in raw.pairs("with"):
            choices: list[str | Node] = []
            for item in value.items if value.kind == "list" else [value]:
                if item.text in ("fresh", "repeat"):
                    choices.append(item.text)
                else:
                    choices.append(loader.expr(item, scope, None))
            fields[name] = tuple(choices)
        to = raw.get("to")
        if to is not None and process and to.text not in processes[process].shared:
            loader.error(
                "unknown-instance",
                f"process '{process}' has no shared instance '{to.text}'",
                to.span,
                suggest(to.text, processes[process].shared),
            )
        budget = raw.get("budget")
        consts = [name for name, _ in self.raw.pairs("consts")]
        if budget is not None and budget.text not in consts:
            loader.error(
                "unknown-name", f"'{budget.text}' is not a constant", budget.span, suggest(budget.text, consts)
            )
        fair = raw.word("fair")
        if fair not in ("", "weak", "strong"):
            loader.error(
                "unknown-value", f"'{fair}' is not a fairness", raw.entries["fair"].span, "known: weak, strong"
            )
        return model.Action(
            key,
            per,
            TRUE if when is None else loader.expr(when, scope, BOOL),
            self.assignments(raw, scope, TRUE),
            process,
            event,
            raw.word("to"),
            fields,
            raw.word("offered") == "true",
            raw.word("budget"),
            fair,
            raw.word("doc"),
            self.raw.entries["actions"].keys[key],
        )

    def prop(self, key: str, raw: Raw) -> model.Property:
        loader, span = self.loader, self.raw.entries["properties"].keys[key]
        answers = tuple(w.text for w in raw.words("answers"))
        kinds = [k for k in QUESTIONS if raw.get(k) is not None]
        if len(kinds) != 1:
            loader.error(
                "bad-property",
                f"property '{key}' has {len(kinds)} of {', '.join(QUESTIONS)}",
                span,
                "give exactly one",
            )
            return model.Property(key, "always", TRUE, span=span)
        kind = kinds[0]
        if kind == "rests":
            if raw.word(kind) != "true":
                loader.error(
                    "bad-property", f"property '{key}' has rests: {raw.word(kind)}", span, "true, or no property"
                )
            return model.Property(key, kind, TRUE, None, raw.word("doc"), answers, span=span)
        if kind != "leads_to":
            formula = loader.expr(raw.entries[kind], self.scope(), BOOL)
            return model.Property(key, kind, formula, None, raw.word("doc"), answers, span=span)
        leads = raw.entries[kind]
        per = [w.text for w in leads.words("per") if self.known(w, self.sorts, "sort")]
        scope = self.scope(per)
        start = loader.expr(leads.entries["from"], scope, BOOL)
        end = loader.expr(leads.entries["to"], scope, BOOL)
        return model.Property(key, kind, start, end, raw.word("doc"), answers, ",".join(per), span)

    def scope_def(
        self, key: str, raw: Raw, consts: dict[str, str], processes: dict[str, model.Process]
    ) -> model.ScopeDef:
        loader = self.loader
        shared = {name: item.machine for process in processes.values() for name, item in process.shared.items()}
        for name, word in raw.pairs("start"):
            place = Raw("scalar", raw.entries["start"].keys[name], name)
            if self.known(place, shared, "instance"):
                self.known(word, self.machines[shared[name]].states, "state")
        for word in raw.words("suites"):
            if word.text not in ("quick", "full"):
                loader.error("unknown-value", f"'{word.text}' is not a suite", word.span, "known: quick, full")
        for name in raw.get("consts").entries if raw.get("consts") else ():  # type: ignore[union-attr]
            if name not in consts:
                where = raw.entries["consts"].keys[name]
                loader.error("unknown-name", f"'{name}' is not a constant", where, suggest(name, consts))
        sizes = {k: int(v.text) for k, v in raw.pairs("sizes")}
        for sort, where in raw.entries["sizes"].keys.items():
            self.known(Raw("scalar", where, sort), self.sorts, "sort")
        for sort in self.sorts:
            if sort not in sizes:
                loader.error("missing-key", f"scope '{key}' gives no size for '{sort}'", raw.entries["sizes"].span)
        suites = tuple(w.text for w in raw.words("suites")) or ("full",)
        properties = [name for name, _ in self.raw.pairs("properties")]
        asks = tuple(w.text for w in raw.words("asks") if self.known(w, properties, "property"))
        if asks and raw.word("symmetry") == "true":
            where = raw.entries["asks"].span
            hint = "a run of one instance is lost where instances are renumbered: drop one of the two"
            loader.error("symmetry-and-liveness", f"scope '{key}' has symmetry and asks for liveness", where, hint)
        return model.ScopeDef(
            key,
            sizes,
            dict.fromkeys(consts, 0) | {k: int(v.text) for k, v in raw.pairs("consts")},
            {k: v.text for k, v in raw.pairs("start")},
            suites,
            asks,
            raw.word("symmetry") == "true",
            raw.word("doc"),
            self.raw.entries["scopes"].keys[key],
        )
