"""What the vLLM connector's namespaces are made of: settings, variables, weights, and when."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd_connectors.vllm.admission import names_its_kv
from tierd_connectors.vllm.identity import fields as vllm_fields
from tierd_connectors.vllm.identity import namespace
from tierd_connectors.vllm.identity import variables as vllm_variables
from tierd_connectors.vllm.identity import watch as vllm_watch
from tierd_connectors.vllm.identity.fields import Verdict
from tierd_connectors.vllm.identity.settings import (
    SettingError,
    plain,
    settings_of,
    text_of,
    variables_of,
)
from tierd_connectors.vllm.identity.weights import (
    ModelFacts,
    UnknownWeightsError,
    files_state,
    identify,
)

LISTINGS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "data" / "vllm_fields").glob("[0-9]*.json"))
}

# The table


@pytest.mark.parametrize("version", LISTINGS)
def test_table_covers_every_setting_of_every_version(version: str) -> None:
    """A setting without a verdict could change KV, and two engines would share blocks."""
    listing = LISTINGS[version]
    fields = {(kind, name) for kind, names in listing["configs"].items() for name in names}
    assert fields - vllm_fields.VERDICTS.keys() == set()
    assert set(listing["variables"]) - vllm_variables.VERDICTS.keys() == set()


def test_table_has_no_unknown_settings() -> None:
    """A verdict on a misspelt name would leave the real setting without one."""
    assert set(LISTINGS) == {"0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"}
    fields = {
        (kind, name)
        for listing in LISTINGS.values()
        for kind, names in listing["configs"].items()
        for name in names
    }
    variables = {name for listing in LISTINGS.values() for name in listing["variables"]}
    assert vllm_fields.VERDICTS.keys() - fields == set()
    assert vllm_variables.VERDICTS.keys() - variables == vllm_variables.BESIDE


def configs(version: str) -> dict[str, type]:
    """Classes with the names and fields of a version's; every field is None at first."""
    return {
        kind: dataclasses.make_dataclass(
            kind, [(name, object, dataclasses.field(default=None)) for name in names]
        )
        for kind, names in LISTINGS[version]["configs"].items()
    }


@pytest.mark.parametrize("version", LISTINGS)
def test_verdict_decides_whether_a_setting_changes_the_namespace(version: str) -> None:
    """A setting that counts would be left out, or one that differs at each start be let in."""
    for kind, config in configs(version).items():
        for field in dataclasses.fields(config):
            wrapped = dataclasses.make_dataclass("Root", [("part", object)])(
                config(**{field.name: "a value"})
            )
            match vllm_fields.VERDICTS[kind, field.name]:
                case Verdict.IN:
                    (changed,) = settings_of(wrapped.part).items()
                    assert changed == (field.name, "a value")
                case Verdict.FREE:
                    assert settings_of(wrapped.part) == {}
                case Verdict.REFUSED:
                    with pytest.raises(SettingError, match=field.name):
                        settings_of(wrapped.part)


@pytest.mark.parametrize(
    "field",
    [
        "ModelConfig.quantization_config",
        "ModelConfig.model_class_overrides",
        "ModelConfig.hf_config",
        "LoRAConfig.target_modules",
        "LoRAConfig.lora_dtype",
        "MultiModalConfig.mm_processor_kwargs",
        "MultiModalConfig.video_pruning_method",
        "MultiModalConfig.mm_encoder_attn_dtype",
        "SpeculativeConfig.quantization",
        "CompilationConfig.custom_ops",
        "KernelConfig.linear_backend",
        "CacheConfig.kv_cache_dtype_skip_layers",
    ],
)
def test_settings_that_caused_wrong_answers_change_the_namespace(field: str) -> None:
    """Engines that differ in one of these were seen to serve each other's KV, or would."""
    kind, name = field.split(".")
    assert vllm_fields.VERDICTS[kind, name] is Verdict.IN


def test_settings_that_differ_at_each_start_are_ignored() -> None:
    """Nothing would be found again after a restart."""
    for kind, name in (
        ("ModelConfig", "hf_overrides"),
        ("VllmConfig", "instance_id"),
        ("KVTransferConfig", "engine_id"),
        ("ParallelConfig", "data_parallel_master_port"),
        ("CacheConfig", "num_gpu_blocks"),
        ("CompilationConfig", "static_forward_context"),
    ):
        assert vllm_fields.VERDICTS[kind, name] is Verdict.FREE


def test_verdict_decides_whether_a_variable_changes_the_namespace() -> None:
    """An engine that multiplies in half precision would share KV with one that does not."""
    for name, verdict in vllm_variables.VERDICTS.items():
        match verdict:
            case Verdict.IN:
                assert variables_of({name: "1"}, ()) == {name: "1"}
            case Verdict.FREE:
                assert variables_of({name: "1"}, ()) == {}
            case Verdict.REFUSED:
                with pytest.raises(SettingError, match=name):
                    variables_of({name: "1"}, ())


def test_a_variable_that_only_vllm_knows_is_refused() -> None:
    """A later vLLM's variable could change KV; a variable that vLLM ignores must not matter."""
    with pytest.raises(SettingError, match="VLLM_LATER is set"):
        variables_of({"VLLM_LATER": "1"}, ["VLLM_LATER"])
    assert variables_of({"VLLM_SERVICE_HOST": "10.0.0.1"}, ["VLLM_LATER"]) == {}


@dataclasses.dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    later: object = None
    listed: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class VllmConfig:
    cache_config: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler_config: object = None
    instance_id: str = ""


@dataclasses.dataclass
class SchedulerConfig:
    max_num_seqs: int = 1
    later: int = 0


def test_a_field_that_only_vllm_knows_is_refused_unless_at_its_default() -> None:
    """A later vLLM's setting could change KV, also one of a config that otherwise does not."""
    assert settings_of(VllmConfig(instance_id="random")) == {}
    assert settings_of(VllmConfig(CacheConfig("fp8"))) == {"cache_config.cache_dtype": "fp8"}
    assert settings_of(VllmConfig(scheduler_config=SchedulerConfig(9))) == {}
    for wrong, name in (
        (VllmConfig(CacheConfig(later=1)), "cache_config.later"),
        (VllmConfig(CacheConfig(listed=[1])), "cache_config.listed"),
        (VllmConfig(scheduler_config=SchedulerConfig(later=1)), "scheduler_config.later"),
    ):
        with pytest.raises(SettingError, match=f"{name} is set, which this tierd does not know"):
            settings_of(wrong)


# Values


class Colour(enum.Enum):
    RED = 1


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def shuffled(value: object, source: random.Random) -> object:
    """The same value, built in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(item, source)) for key, item in value.items()]
        source.shuffle(items)
        return dict(items)
    return [shuffled(item, source) for item in value] if isinstance(value, list) else value


@given(VALUES, VALUES, st.randoms(use_true_random=False))
def test_only_different_values_have_different_texts(
    one: object, two: object, source: random.Random
) -> None:
    """Two starts of an engine would not share, or two engines that must not would."""
    text = text_of(plain(one, "x"))
    assert text_of(plain(shuffled(one, source), "x")) == text
    assert (text_of(plain(two, "x")) == text) == (repr_of(one) == repr_of(two))


def repr_of(value: object) -> str:
    """Python's text of a value with sorted keys, without keys that add nothing."""
    if isinstance(value, dict):
        items = sorted(value.items())
        return f"{{{','.join(f'{key!r}:{repr_of(item)}' for key, item in items)}}}"
    return f"[{','.join(map(repr_of, value))}]" if isinstance(value, list) else repr(value)


def test_sets_and_names_have_a_stable_text(tmp_path: Path) -> None:
    """What differs between two processes, such as the order of a set, would get in."""
    many = {f"{i}" for i in range(50)}
    assert plain(many, "x") == plain(frozenset(many), "x") == sorted(many)
    assert plain(Colour.RED, "x") == "Colour.RED"
    assert plain(tmp_path, "x") == str(tmp_path)
    assert plain((1, b"\x01"), "x") == [1, "01"]
    assert plain(VllmConfig, "x") == f"{__name__}:VllmConfig"
    assert text_of(plain({1: 2}, "x")) == text_of(plain({"1": 2}, "x"))


@dataclasses.dataclass
class Described:
    """As a model's config: a dataclass with attributes beside its fields."""

    width: int = 1

    def to_dict(self) -> dict[str, object]:
        return vars(self)


def described(**more: object) -> Described:
    config = Described()
    vars(config).update(more)
    return config


def test_model_configs_are_compared_by_value() -> None:
    """A moved directory or an upgrade would be another model, or an override be left out."""
    nested = {"_name_or_path": "/a", "transformers_version": "1", "rope": 1}
    base = plain(described(text=described(**nested)), "x")
    moved = described(text=described(**nested | {"_name_or_path": "/b"}))
    assert plain(moved, "x") == base
    assert plain(described(text=described(**nested | {"rope": 2})), "x") != base


@pytest.mark.parametrize("value", [object(), lambda config: config, [iter(())], {"a": print}])
def test_incomparable_values_are_refused_by_name(value: object) -> None:
    """An object's address would make every start another namespace, or none of two the same."""
    with pytest.raises(SettingError, match=r"^model_config\.hf_overrides"):
        plain(value, "model_config.hf_overrides")


def test_recursive_values_are_refused() -> None:
    """The engine's start would end in a recursion error."""
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(SettingError, match="levels deep"):
        plain(endless, "x")


# Weights


def facts(model: Path | str, **changes: object) -> ModelFacts:
    """Of a model whose files were seen as they are now, before and after it was loaded."""
    state = files_state(str(model))
    base = ModelFacts(
        model=str(model), commit=None, load_format="auto", seed=0, states=[state, state]
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # the test's own


def model_directory(path: Path, payload: bytes = b"w" * 200_000) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "modeling.py").write_text("ROPE_BASE = 10000\n")
    (path / "model.safetensors").write_bytes(payload)
    for file in path.iterdir():
        os.utime(file, (1, 1))
    return path


def test_weight_files_of_equal_size_have_different_namespaces(tmp_path: Path) -> None:
    """Two fine-tunes have equal names and sizes: one would be served the other's KV."""
    one = model_directory(tmp_path / "a" / "m")
    two = model_directory(tmp_path / "b" / "m", b"w" * 100_000 + b"v" * 100_000)
    first, second = identify(facts(one), None), identify(facts(two), None)
    assert first.model == second.model == "m"
    assert first.weights != second.weights
    assert identify(facts(one), None) == first
    assert identify(facts(one.rename(tmp_path / "m")), None) == first, "moved as it is"
    os.utime(two / "model.safetensors", (2, 2))
    assert identify(facts(two), None) != second


def test_custom_model_code_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Another constant in the model's code is other KV from the same weights."""
    folder = model_directory(tmp_path / "m")
    before = identify(facts(folder), None)
    (folder / "modeling.py").write_text("ROPE_BASE = 50000\n")
    os.utime(folder / "modeling.py", (1, 1))
    assert identify(facts(folder), None) != before


def rewrite(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"v" * 200_000)


def replace(folder: Path) -> None:
    """As a deployment does: the new file takes the name, size and times of the old one."""
    (folder / "new").write_bytes(b"v" * 200_000)
    os.utime(folder / "new", (1, 1))
    (folder / "new").rename(folder / "model.safetensors")


def swap_and_back(folder: Path) -> None:
    old = (folder / "model.safetensors").read_bytes()
    replace(folder)
    (folder / "model.safetensors").write_bytes(old)
    os.utime(folder / "model.safetensors", (1, 1))


def add(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"v")


def remove(folder: Path) -> None:
    (folder / "modeling.py").unlink()


@pytest.mark.parametrize("change", [rewrite, replace, swap_and_back, add, remove])
@pytest.mark.parametrize("when", ["while they are loaded", "after"])
def test_files_that_change_while_the_engine_starts_are_refused(
    tmp_path: Path, change: Callable[[Path], None], when: str
) -> None:
    """The old weights' KV would be stored under the new weights' name."""
    folder = model_directory(tmp_path / "m")
    before = files_state(str(folder))
    after = before
    change(folder)
    if when == "while they are loaded":
        after = files_state(str(folder))
    with pytest.raises(UnknownWeightsError, match="changed while the engine started"):
        identify(facts(folder, states=[before, after]), None)
    assert identify(facts(folder), None).weights.startswith("files:"), "the next start"


def test_weights_loaded_without_the_plugin_are_refused(tmp_path: Path) -> None:
    """Without the plugin, the files that were read are not known."""
    folder = model_directory(tmp_path / "m")
    with pytest.raises(UnknownWeightsError, match="VLLM_PLUGINS"):
        identify(facts(folder, states=()), None)
    with pytest.raises(UnknownWeightsError, match="changed"):
        identify(facts(folder, states=[files_state(str(folder)), None]), None)


def test_snapshot_path_and_repository_name_agree(tmp_path: Path) -> None:
    """An offline engine, which is given a path, would not share with an online one."""
    commit = "a" * 40
    path = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    model_directory(path)
    assert identify(facts(path), None) == identify(facts("org/name", commit=commit), None)
    path = tmp_path / "hub" / "models--name" / "snapshots" / commit
    path.mkdir(parents=True)
    assert identify(facts(path), None) == identify(facts("name", commit=commit), None)


def test_unidentified_weights_are_refused(tmp_path: Path) -> None:
    """Weights of unknown origin would be confused with others of the same shape."""
    folder = model_directory(tmp_path / "m")
    for unknown in (
        facts(folder, load_format="mine"),
        facts("s3://bucket/model"),
        facts("org/name"),
        facts(folder, elsewhere="s3://bucket/model"),
    ):
        with pytest.raises(UnknownWeightsError, match='"weights": "NAME"'):
            identify(unknown, None)
        assert identify(unknown, "v1").weights == "given:v1"
    with pytest.raises(UnknownWeightsError, match='"draft_weights": "NAME"'):
        identify(facts("org/name", setting="draft_weights"), None)
    seeds = {
        identify(facts(folder, load_format="dummy", seed=seed), None).weights for seed in (0, 1)
    }
    assert len(seeds) == 2


# Watching


class Model:
    """A model whose weights are a file's bytes."""

    def load_weights(self, weights: bytes) -> None:
        self.weights = weights


class Worker:
    """The methods of vLLM's worker that can replace weights."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def reload_weights(self, weights: bytes) -> None:
        self.model.load_weights(weights)

    def update_weights(self, weights: bytes) -> None:
        self.model.weights = weights

    def apply_model(self, function: Callable[[Model], object]) -> object:
        return function(self.model)

    def sleep(self, level: int = 1) -> int:
        return level


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> type:
    """A watched loader, in a vLLM that is not there."""

    class BaseModelLoader:
        def load_model(self, vllm_config: object, model_config: SimpleNamespace) -> Model:
            model = Model()
            model.load_weights(Path(model_config.model, "model.safetensors").read_bytes())
            model_config.during()
            return model

    class Own(BaseModelLoader):
        def load_model(self, vllm_config: object, model_config: SimpleNamespace) -> Model:
            return super().load_model(vllm_config, model_config)

    package = ModuleType("vllm.model_executor.model_loader")
    package.BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]  # as vLLM has it
    package._LOAD_FORMAT_TO_MODEL_LOADER = {"own": Own}  # type: ignore[attr-defined]  # as well
    worker = ModuleType("vllm.v1.worker.gpu_worker")
    worker.Worker = type("Worker", (Worker,), {})  # type: ignore[attr-defined]  # as vLLM has it
    for module in (package, worker):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vllm_watch.watch()
    vllm_watch.watch()
    vllm_watch.take()
    return Own


def load(
    loader: type, folder: Path, during: Callable[[], None] = lambda: None
) -> tuple[vllm_watch.Weights, Worker]:
    """What an engine has loaded by the time its connector is made, and its worker."""
    config = SimpleNamespace(model=str(folder), during=during)
    model = loader().load_model(vllm_config=None, model_config=config)
    worker: Worker = sys.modules["vllm.v1.worker.gpu_worker"].Worker(model)
    return vllm_watch.take(), worker


def test_file_state_is_read_before_and_after_loading(loader: type, tmp_path: Path) -> None:
    """Files that are replaced between the load and the connector would be taken for the weights."""
    folder = model_directory(tmp_path / "m")
    weights, _ = load(loader, folder)
    now = files_state(str(folder))
    assert {(seen.model, seen.before, seen.after) for seen in weights.loads} == {
        (str(folder), now, now)
    }
    weights, _ = load(loader, folder, lambda: rewrite(folder))
    assert all(seen.before == now != seen.after for seen in weights.loads)
    assert vllm_watch.take().loads == [], "the next engine's"


@pytest.mark.parametrize(
    "replace_them",
    [
        lambda worker: worker.reload_weights(b"new"),
        lambda worker: worker.update_weights(b"new"),
        lambda worker: worker.model.load_weights(b"new"),
        lambda worker: worker.apply_model(lambda model: setattr(model, "weights", b"new")),
        lambda worker: worker.sleep(2),
        lambda worker: worker.sleep(level=2),
    ],
)
def test_replaced_weights_are_detected(
    loader: type, tmp_path: Path, replace_them: Callable[[Worker], object]
) -> None:
    """The new weights' KV would be stored under the old ones' name."""
    weights, worker = load(loader, model_directory(tmp_path / "m"))
    assert weights.moved == ""
    assert worker.sleep() == 1
    assert weights.moved == "", "level 1 keeps the weights"
    replace_them(worker)
    assert weights.moved
    fresh, _ = load(loader, tmp_path / "m")
    assert fresh.moved == "", "another engine of this process"


def test_code_outside_vllm_is_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of a model's own code would share KV."""
    kind = type("Theirs", (Model,), {"__module__": "transformers_modules.abc.modeling"})
    texts = ["BASE = 1", "BASE = 2"]
    found = []
    for folder, text in zip("ab", texts, strict=True):
        file = tmp_path / folder / "modeling.py"
        file.parent.mkdir()
        file.write_text(text)
        module = ModuleType("transformers_modules.abc.modeling")
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        found.append(vllm_watch.code_of(kind))
    assert found[0] != found[1]
    file.write_text(texts[0])
    assert vllm_watch.code_of(kind) == found[0], "wherever it lies"
    own = type("Own", (), {"__module__": "vllm.models.llama"})
    monkeypatch.delitem(sys.modules, "transformers_modules.abc.modeling")
    assert vllm_watch.code_of(own) == frozenset()


# Platforms


def platform_of(monkeypatch: pytest.MonkeyPatch, kind: str, version: str) -> str:
    """What a GPU's kind comes to, on a machine that has none."""
    gpu = SimpleNamespace(
        is_cuda=lambda: kind == "cuda",
        is_cpu=lambda: False,
        device_name=kind,
        get_device_capability=lambda: SimpleNamespace(as_version_str=lambda: version),
    )
    module = ModuleType("vllm.platforms")
    module.current_platform = gpu  # type: ignore[attr-defined]  # as vLLM has it
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    context = {"layer": SimpleNamespace(attn_backend=backend)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    return namespace._platform(config, "layer")


def test_different_gpus_have_different_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of fp8 would be read as the other, or weights multiplied in another precision."""
    assert platform_of(monkeypatch, "cuda", "9.0") != platform_of(monkeypatch, "cuda", "8.0")
    assert platform_of(monkeypatch, "cuda", "9.0").endswith(":FLASH_ATTN")
    for other in ("rocm", "xpu"):
        with pytest.raises(namespace.UnsupportedEngineError, match=other):
            platform_of(monkeypatch, other, "9.4")


def test_commit_is_read_from_the_weights() -> None:
    """With --hf-config-path the config's commit would stand for the weights'."""

    class Revision(str):
        resolved = "a" * 40
        _repo_id = "org/weights"

    model = SimpleNamespace(
        model="org/weights",
        revision=Revision("main"),
        hf_config=SimpleNamespace(_commit_hash="c" * 40),
    )
    assert namespace._commit(model) == "a" * 40
    model.model = "org/other"
    assert namespace._commit(model) is None
    for unknown in (None, "main", "a" * 39):
        model.revision = unknown
        assert namespace._commit(model) is None
    model.revision = "b" * 40
    assert namespace._commit(model) == "b" * 40


# Requests


def test_images_are_skipped_unless_their_uuids_are_trusted() -> None:
    """A client could give another image's identifier to its own, and poison it for a fleet."""
    text = SimpleNamespace(mm_features=[])
    image = SimpleNamespace(mm_features=[object()])
    assert names_its_kv(text, media_trusted=False)
    assert not names_its_kv(image, media_trusted=False)
    assert names_its_kv(image, media_trusted=True)
    for name in ("resumable", "skip_reading_prefix_cache"):
        assert not names_its_kv(SimpleNamespace(**{name: True}), media_trusted=True)
