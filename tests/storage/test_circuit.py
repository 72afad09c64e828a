"""The breaker's decisions, compared with a plain model after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from tierd.storage.circuit import Circuit, State
from tierd.storage.in_flight import Call

SLOW_S = 1.0


@dataclass(eq=False)
class ModelCall:
    began_s: float
    lookup: bool
    fresh: bool = True
    blamed: bool = False


@dataclass
class Model:
    """The circuit's rules, written as plainly as possible."""

    now_s: float = 100.0
    state: str = "closed"
    since_s: float | None = None
    opened: int = 0
    calls: dict[Call, ModelCall] = field(default_factory=dict)
    trial: Call | None = None
    doubt_s: float | None = None
    usual_s: dict[bool, float] = field(default_factory=dict)
    """Usual duration of a successful call, by whether it is a lookup."""
    results: list[tuple[bool, bool]] = field(default_factory=list)
    """For each call: whether it was a lookup, and whether it succeeded."""

    def stalled_since(self) -> float | None:
        if self.doubt_s is not None:
            return self.doubt_s
        slow = [m.began_s for m in self.calls.values() if self.now_s - m.began_s > SLOW_S]
        return min(slow) + SLOW_S if slow else None

    def shown(self) -> str:
        stalled = self.state != "open" and self.stalled_since() is not None
        return "stalled" if stalled else self.state

    def allowed(self) -> bool:
        return self.shown() == "closed" or (self.shown() == "half_open" and self.trial is None)

    def in_doubt(self) -> bool:
        return self.doubt_s is not None and not any(m.blamed for m in self.calls.values())

    def enter(self, state: str) -> None:
        if state == self.state:
            return
        self.state, self.since_s = state, self.now_s
        self.opened += state == "open"
        if state != "half_open":
            self.results = []
            for model in self.calls.values():
                model.fresh = False
        if state == "open":
            self.trust()

    def trust(self) -> None:
        self.doubt_s = None
        for model in self.calls.values():
            model.blamed = False

    def result(self, lookup: bool, good: bool) -> None:
        if self.state == "half_open":
            if not good:
                self.enter("open")
            elif not lookup:
                self.enter("closed")
            return
        self.results.append((lookup, good))
        alike = [good for kind, good in self.results if kind == lookup][-20:]
        if not good and (alike[-3:] == [False] * 3 or alike.count(False) >= max(6, len(alike) / 2)):
            self.enter("open")

    def end(self, call: Call, failed: bool) -> None:
        model = self.calls.pop(call)
        self.trial = None if call is self.trial else self.trial
        good = not failed and self.now_s - model.began_s <= SLOW_S
        if good:
            took_s = self.now_s - model.began_s
            usual_s = self.usual_s.get(model.lookup, 0) or took_s
            self.usual_s[model.lookup] = usual_s + (took_s - usual_s) / 8
        waited_for = {m.lookup for m in self.calls.values() if m.blamed}
        if good and model.blamed and not (model.lookup and False in waited_for):
            self.trust()
        if model.fresh:
            self.result(model.lookup, good)

    def abandon(self, call: Call) -> None:
        model = self.calls.pop(call)
        blamed_trial = call is self.trial and model.blamed
        self.trial = None if call is self.trial else self.trial
        if model.fresh and (self.now_s - model.began_s > SLOW_S or blamed_trial):
            self.result(model.lookup, False)

    def blame(self) -> None:
        if self.state == "open":
            return
        late = [
            model
            for model in self.calls.values()
            if self.now_s - model.began_s >= self.usual_s.get(model.lookup, 0)
        ]
        for model in late:
            model.blamed = True
        if self.state == "closed" and late and self.doubt_s is None:
            self.doubt_s = self.now_s

    def probed(self, failed: bool) -> None:
        if self.in_doubt():
            self.trust()
            if failed:
                self.enter("open")
        elif self.state == "open" and not failed:
            self.enter("half_open")


def step(random: Random, circuit: Circuit, model: Model) -> str:
    """Apply one random event to both; return its description."""
    now_s, failed = model.now_s, random.random() < 0.4
    what = random.choice(
        ("wait", "begin", "begin", "end", "end", "abandon", "miss", "blame", "probe")
    )
    call = random.choice(list(model.calls)) if model.calls else None
    if what == "wait":
        model.now_s += random.choice((0.1, 0.1, 0.4, SLOW_S, SLOW_S + 0.1, 2.0))
    elif what == "begin" and model.allowed():
        lookup = random.random() < 0.5
        call = circuit.begin(now_s, lookup=lookup)
        model.calls[call] = ModelCall(now_s, lookup)
        if model.state == "half_open":
            model.trial = call
    elif what == "end" and call is not None:
        circuit.end(call, now_s, "down" if failed else None)
        model.end(call, failed)
    elif what == "abandon" and call is not None:
        circuit.abandon(call, now_s)
        model.abandon(call)
    elif what == "miss" and call is not None and random.random() < 0.2:
        circuit.miss(now_s, "no answer")
        model.enter("open")
    elif what == "blame" and random.random() < 0.5:
        circuit.blame(now_s)
        model.blame()
    elif what == "probe":
        circuit.probed(now_s, "down" if failed else None)
        model.probed(failed)
    return f"{model.now_s:.1f} {what}{' failed' if failed else ''}: {model.shown()}"


def agree(circuit: Circuit, model: Model) -> None:
    assert circuit.allows(model.now_s) == model.allowed()
    assert circuit.is_open == (model.state == "open")
    assert circuit.in_doubt == model.in_doubt()
    assert circuit.state(model.now_s) is State(model.shown())
    status = circuit.status(model.now_s)
    since_s = model.stalled_since() if model.shown() == "stalled" else model.since_s
    if since_s is None:
        assert status["since_s"] is None
    else:
        assert status["since_s"] == round(model.now_s - since_s, 3)
    assert (status["state"], status["opened_total"]) == (model.shown(), model.opened)


@pytest.mark.slow
def test_circuit_matches_the_model() -> None:
    """After some order of events a failing tier would be asked, or a sound tier never again."""
    seen: set[str] = set()
    for seed in range(200):
        random = Random(seed)
        circuit, model = Circuit("nvme", "reads", slow_s=SLOW_S), Model()
        steps: list[str] = []
        for _ in range(120):
            steps.append(step(random, circuit, model))
            try:
                agree(circuit, model)
            except AssertionError as error:
                error.add_note("\n".join([f"seed {seed}", *steps]))
                raise
            seen.add(model.shown())
    assert seen == {"closed", "stalled", "open", "half_open"}
