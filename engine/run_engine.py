"""A vLLM engine driven by JSON lines: commands on stdin, one result a line on stdout.

Runs in the engine's python: `run_engine.py '{"model": DIR, ...}'`. Settings: `model`,
`socket` (none: no connector), `extra` (the connector's own settings), `llm` (arguments of
LLM), `processes` (engine core and workers in processes of their own), `second` (a module of the
tests with a connector that is asked before tierd's, under MultiConnector), `lora` (the directory
of an adapter `a`, for all requests), `swap` (a file, and the one that it replaces once weights are
read). Commands:

    {"do": "generate", "prompts": [[token, ...], ...], "tokens": 16}
    {"do": "start", ...}     as generate, but returns at once
    {"do": "join"}           the result of the last start
    {"do": "reset"}          empty the engine's own prefix cache; "external": also tierd's
    {"do": "stats"}          what the connector counted (one process only)
    {"do": "abort", ...}     add requests, make `steps` steps, abort them; one process only
    {"do": "reload_weights"}   read the model's weights again
    {"do": "fail_loads", "count": 3}   the next loads fill half and fail; one process only
    {"do": "fail_build"}     the next step in which a running request gets a block has an error
    {"do": "hold_stores", "held": true}   stores wait, or go on and have ended
    {"do": "second", "offers": true}      what is set of the second connector's state, and all of it
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

# Results have this process's standard output to themselves: whatever the engine prints, from
# whichever thread, goes to standard error.
_results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(result: dict) -> None:
    """Print one result."""
    _results.write(json.dumps(result) + "\n")
    _results.flush()


def environment(settings: dict) -> None:
    """What vLLM reads from the environment, before it is imported."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.get("kv_gib", 1)),
        "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if settings.get("processes") else "0",
    }
    for name, value in {**fixed, **settings.get("env", {})}.items():
        os.environ.setdefault(name, value)


VLLM_METRICS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_hits": "own_hits",
    "vllm:external_prefix_cache_queries": "external_queries",
    "vllm:external_prefix_cache_hits": "external_hits",
}
"""vLLM's own counters in `stats`, in tokens but for the first."""


def make_engine(settings: dict):
    """The engine."""
    from vllm import LLM

    importlib.import_module("model").register()
    arguments = {
        "model": settings["model"],
        "load_format": "seeded",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 8192,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "block_size": 32,
        "enforce_eager": True,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "seed": 0,
        "disable_log_stats": False,
    }
    if settings.get("socket"):
        tierd = {
            "kv_connector": "TierdConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "socket": settings["socket"],
                "weights": "seeded",
                **settings.get("extra", {}),
            },
        }
        arguments["kv_transfer_config"] = tierd
        if settings.get("second"):
            second = {
                "kv_connector": "SecondConnector",
                "kv_connector_module_path": _second(settings).__name__,
                "kv_role": "kv_both",
            }
            arguments["kv_transfer_config"] = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [second, tierd]},
            }
    arguments.update(settings.get("llm", {}))
    if "swap" in settings:
        swap_files(*settings["swap"])
    return LLM(**arguments)


def _second(settings: dict):
    path = Path(settings["second"])
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def swap_files(new: str, old: str) -> None:
    """Have `new` replace `old` after weights are read and before the connector sees KV."""
    connector = importlib.import_module("tierd_connectors.vllm").TierdConnector
    real = connector.register_kv_caches

    def later(self, kv_caches) -> None:
        os.replace(new, old)
        real(self, kv_caches)

    connector.register_kv_caches = later


def generate(llm, command: dict, lora: str = "") -> dict:
    """Greedy tokens of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=command.get("tokens", 16), temperature=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    if "salts" in command:
        for prompt, salt in zip(prompts, command["salts"], strict=True):
            prompt["cache_salt"] = salt
    request = lora and importlib.import_module("vllm.lora.request").LoRARequest("a", 1, lora)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=request or None)
    seconds = time.perf_counter() - started
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "ttft": [round(output.metrics.first_token_latency, 5) for output in outputs],
        "seconds": round(seconds, 5),
    }


def connectors(llm) -> list:
    """The connector objects of this process, scheduler's and worker's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    found = [_core(llm).scheduler.connector]
    if has_kv_transfer_group():
        found.append(get_kv_transfer_group())
    return [
        connector
        for one in found
        for connector in getattr(one, "_connectors", [one])
        if hasattr(connector, "boundary")
    ]


def stats(llm) -> dict:
    """Sums of the connector's counters as vLLM's own metrics show them."""
    found: dict = {"leases": 0, "off": "", "errors": 0, "blocks_in_use": _blocks_in_use(llm)}
    found["epochs"], found["attached"] = [], []
    for metric in llm.get_metrics():
        if metric.name in VLLM_METRICS:
            found[VLLM_METRICS[metric.name]] = metric.value
        if metric.name.startswith("vllm:tierd_"):
            found[metric.name.removeprefix("vllm:tierd_")] = metric.value
    # Of the connectors themselves: the counter of that name is some steps behind.
    found["errors"] = sum(connector.boundary.errors for connector in connectors(llm))
    for connector in connectors(llm):
        found["off"] = found["off"] or connector.boundary.off
        if connector._scheduler is not None:
            found["leases"] += connector._scheduler.leases_held
            found["epochs"].append(connector._scheduler.epoch.hex())
        if connector._worker.mover is not None:
            found["epochs"].append(connector._worker.mover.epoch.hex())
            found["attached"].append(connector._worker.mover.attached)
    found["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


def _core(llm):
    return llm.llm_engine.engine_core.engine_core


def _blocks_in_use(llm) -> int:
    pool = _core(llm).scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1)


def abort(llm, command: dict) -> dict:
    """Add requests, make some steps, and abort whatever has not ended."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    names = [f"abort-{time.monotonic_ns()}-{i}" for i in range(len(command["prompts"]))]
    for name, prompt in zip(names, command["prompts"], strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    for _ in range(command["steps"]):
        engine.step()
    engine.abort_request(names)
    for _ in range(2000):
        if not _core(llm).scheduler.has_requests():
            break
        engine.step()
    return {"left": len(_core(llm).scheduler.requests)}


def fail_loads(llm, count: int) -> dict:
    """Have the worker's next loads write some blocks and then fail."""
    mover = next(c._worker.mover for c in connectors(llm) if c._worker.mover is not None)
    real = {name: getattr(mover, name) for name in ("_copy_in", "_ask_load")}

    def fail(*arguments) -> bool:
        nonlocal count
        count -= 1
        if count == 0:
            for name, method in real.items():
                setattr(mover, name, method)
        load = next(a for a in arguments if hasattr(a, "request_id"))
        half = len(load.blocks) // 2
        rubbish = memoryview(bytes([7]) * mover._block_bytes)
        mover._pages.scatter_many([rubbish] * half, load.blocks[:half])
        return False

    for name in real:
        setattr(mover, name, fail)
    return {}


def fail_build(llm) -> dict:
    """Have the scheduler's side err once, while some request needs to hear of a new block."""
    side = next(c._scheduler for c in connectors(llm) if c._scheduler is not None)
    real = side.build

    def build(scheduled, *arguments, **named):
        steps = list(scheduled)
        if any(step.blocks for step in steps):
            side.build = real
            raise RuntimeError("an error in a step")
        return real(steps, *arguments, **named)

    side.build = build
    return {}


def hold_stores(llm, held: bool) -> dict:
    """Have the worker's mover begin no store, as if it were behind with its work."""
    mover = next(c._worker.mover for c in connectors(llm) if c._worker.mover is not None)
    if held:
        mover._take_chunk = lambda: None
        return {}
    vars(mover).pop("_take_chunk", None)
    mover._wake()
    until = time.monotonic() + 20
    # Loads of the second connector are none of the mover's.
    while not mover.settled and time.monotonic() < until:
        time.sleep(0.001)
    return {"settled": mover.settled}


def second(settings: dict, command: dict) -> dict:
    """Set and show the second connector's state."""
    state = _second(settings).State
    for name, value in command.items():
        if name != "do":
            setattr(state, name, value)
    return {name: getattr(state, name) for name in ("offers", "finishes", "filled")}


def main() -> None:
    settings = json.loads(sys.argv[1])
    environment(settings)
    sys.path.insert(0, str(Path(__file__).parent))
    started = time.perf_counter()
    llm = make_engine(settings)
    say({"ready": round(time.perf_counter() - started, 2)})
    running = threading.Thread()
    answer: list[dict] = []
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "generate":
                say(generate(llm, command, settings.get("lora", "")))
            case "reload_weights":
                llm.collective_rpc("reload_weights")
                say({})
            case "start":
                answer = []
                running = threading.Thread(
                    target=lambda c=command, a=answer: a.append(generate(llm, c))
                )
                running.start()
                say({})
            case "join":
                running.join()
                say(answer[0])
            case "reset":
                external = bool(command.get("external"))
                say({"reset": bool(llm.reset_prefix_cache(reset_connector=external))})
            case "stats":
                say(stats(llm))
            case "fail_loads":
                say(fail_loads(llm, command["count"]))
            case "fail_build":
                say(fail_build(llm))
            case "hold_stores":
                say(hold_stores(llm, command["held"]))
            case "second":
                say(second(settings, command))
            case "abort":
                say(abort(llm, command))
    if settings.get("processes"):
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that vLLM has spawned: the load format must be known there as well.
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("model").register()
