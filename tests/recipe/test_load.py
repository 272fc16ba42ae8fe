"""Recipes: what is read, what is refused, and in which words; the reference of all keys; what settings
of an engine say of it."""

from __future__ import annotations

import os
import random
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.job import flat_tables
from imagenet_fast.recipe.key_reference import Key, recipe_keys
from imagenet_fast.recipe.load import find_file, load_recipe, parse_engines, parse_recipe, shipped, to_toml
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    LazySync,
    PowerSgdSync,
    SparseSync,
    engines,
)
from imagenet_fast.recipe.sync_table import SyncTable
from tests.conftest import refusal_of, tables
from tests.corruption import corrupted

CORRECTED = {"kind": "sparse", "momentum_correction": True}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small recipe."""
    path = tmp_path_factory.mktemp("recipes") / "my.toml"
    path.write_text(tomli_w.dumps(tables(sync={"kind": "lazy"})))
    return path


def test_a_shipped_recipe_survives_being_written_out_in_full(tmp_path: Path):
    """Also with the byte order mark that editors of Windows write."""
    for name in shipped("recipe"):
        recipe = load_recipe(name)
        (tmp_path / "full.toml").write_text(to_toml(recipe), encoding="utf-8-sig")
        assert load_recipe(tmp_path / "full.toml") == recipe


WRONG = r"""
optim.lrr=1 -> unknown key optim.lrr; did you mean optim.lr?
optim.kind=lars; optim.nesterov=true ->
    optim.nesterov is for optim.kind 'sgd', not 'lars'; leave it out, or replace the whole table, as by --set 'optim={
optim.lr=-1 -> optim.lr is -1: input should be greater than 0
sync.kind=rng -> sync.kind is 'rng'; it must be one of 'allreduce', 'ring', 'lazy'
optim={lr=1.0} -> optim.kind is missing
optim={kind='sgd', lr=1.0} -> optim.weight_decay is missing; add it
optim.lr=inf -> optim.lr is Infinity: input should be a finite number
model.kind=alexnet -> data.image_size (32) is too small for alexnet, which needs 63
eval_shift=1 -> eval_shift is for eval_mirror, which is off; set eval_mirror to true
eval_mirror=true; eval_shift=32 -> eval_shift (32) must be less than the side of a validation image (32 pixels)
schedule.warmup_epochs=9 -> schedule.warmup_epochs (9.0) exceeds epochs (2)
sync.kind=hybrid; clip_norm=1.0 -> sync.kind 'hybrid' updates a layer before the gradients of
sync.kind=auto; compile=true -> sync.kind 'auto' with sync.defer true waits for each layer
sync.kind=lazy; sync.wire=int8; precision.kind=fp16 ->
    overflows (precision.kind 'fp16'); set precision.kind to 'bf16', or take sync.wire 'bf16'
sync.kind=sparse; clip_norm=1.0 ->
    it cannot clip the norm of one (clip_norm 1.0); set clip_norm to 0, or take another engine
sync.kind=sparse; sync.momentum_correction=true; optim.kind=lars -> optim.kind 'lars' is another
sync.kind=sparse; sync.momentum_correction=true; optim.kind=sgd; optim.nesterov=true ->
    optim.nesterov true is another; turn it off
sync.kind=sparse; sync.momentum_correction=true; sync.wire=fp16 -> keeps in its velocity what overflows in wire 'fp16'
data={loader='dali', dataset='digits', image_size=32, resize=32}; data.dali.host_pading_mb=1 ->
    unknown key data.dali.host_pading_mb; did you mean data.dali.host_padding_mb?
data={loader='dali', dataset='digits', image_size=32, resize=32}; data.zz=1 -> on_bad_image, dali, mean, std
parallel.pipeline=2; parallel.schedule=zero-bubble ->
    parallel.schedule is "zero-bubble": input should be 'gpipe', '1f1b' or 'interleaved'
model.kind=alexnet; data.image_size=63; parallel.pipeline=5; parallel.schedule=interleaved; parallel.micro_batches=5 ->
    parallel.pipeline 5 with schedule interleaved cuts alexnet into 10 stages, and it comes in 8 pieces
model.kind=alexnet; data.image_size=63; parallel.tensor=2; sync.kind=auto; optim.kind=lars ->
    sync.kind 'auto' with sync.defer true may choose other engines for other shards, and optim.kind 'lars' adds
parallel.tensor=2 -> parallel.tensor 2 divides AlexNet's large fully connected layers, and model.
model.kind=alexnet; data.image_size=63; parallel.tensor=3 ->
    tensor 3 does not divide the 4096 units of alexnet's fully connected layers; take a power of 2 up to 4096
model.kind=alexnet; data.image_size=63; parallel.tensor=2; compile=true ->
    amid what would be compiled as one piece (compile
model.kind=alexnet; data.image_size=63; parallel.tensor=2; sync.kind=ddp ->
    parallel.tensor 2 averages some parameters over other ranks than others, and sync.kind 'ddp' has one
parallel.pipeline=2; parallel.schedule=gpipe; sync.kind=ddp ->
    sync.kind 'ddp' has one group of ranks for all; take another engine, such as sync.kind 'lazy', or set parallel
parallel.micro_batches=4 -> parallel: micro_batches and schedule are those of a pipeline; leave them out, or
parallel.pipeline=4; parallel.micro_batches=3 ->
    schedule 1f1b has a micro-batch for each of 4 stages at least, and 3 are fewer; raise micro_batches, or
parallel.pipeline=4; parallel.micro_batches=9; parallel.schedule=interleaved ->
    takes micro-batches in equal rounds, and 9 do not make 2; take a multiple of 4
graph=true; sync.kind=ddp ->
    graph true replays steps, and sync.kind 'ddp' keeps parts of autograd's graph from step to step; set graph to 'auto'
graph=true; parallel.pipeline=2; parallel.micro_batches=4 ->
    graph true replays steps, and parallel.pipeline 2 sends activations in the middle of a step; set graph to 'auto'
"""
"""Changes of a small recipe, as `--set` makes them, and what is said to them."""


def test_a_wrong_recipe_is_met_with_the_key_and_the_fix(written: Path):
    for change, sentence in re.findall(r"^(\S.*?) ->\s+(.*)$", WRONG, re.MULTILINE):
        told = refusal_of(load_recipe, written, overrides=change.split("; "))
        assert told.startswith("my.toml: ")
        assert sentence in told, change


def test_what_looks_like_a_mistake_is_doubted_and_kept(written: Path):
    for change, doubt in (
        ("target_top1=0.85", ["target_top1 is 0.85 %; did you mean 85?"]),
        ("target_top1=1", []),
        ("target_top1=85", []),
        ("schedule.start_lr=0.5", ["schedule.start_lr is 0.5, above optim.lr (0.1); lower it, too"]),
    ):
        recipe = load_recipe(written, overrides=[change])
        assert recipe.doubts() == doubt
        assert "target_top1" not in change or recipe.target_top1 == float(change.partition("=")[2])


def test_engines_take_what_their_kind_can_do(written: Path):
    for change in (
        "sync.kind=hybrid; precision={kind='fp16', loss_scale=128.0}",
        "sync.kind=dear; precision.kind=fp16",
        "sync.kind=auto; sync.defer=false; clip_norm=1; compile=true",
        "sync.kind=lazy; clip_norm=1; precision.kind=fp16",
    ):
        assert load_recipe(written, overrides=change.split("; ")).sync.kind in change


def test_engines_of_a_benchmark_take_a_wire_and_keys_of_their_own():
    taken = parse_engines("lazy,ddp:fp32", "fp16", ["lazy.threshold_mb=2"])
    assert taken == [LazySync(wire="fp16", threshold_mb=2), DdpSync(wire="fp32")]
    for text, overrides, sentence in (
        ("lazy:int4", [], "sync.wire is"),
        ("sparse:int8", [], "sync.wire is"),
        ("rng", [], "sync.kind is 'rng'"),
        ("lazy", ["ring.bucket_mb=2"], "is not ENGINE.KEY=VALUE with an engine of --sync lazy"),
        ("lazy", ["lazy=2"], "is not ENGINE.KEY=VALUE"),
    ):
        assert sentence in refusal_of(parse_engines, text, "bf16", overrides)


def test_set_overrides_any_key_in_tomls_own_notation():
    recipe = load_recipe(
        find_file("recipe", "demo"),
        overrides=["epochs=3", "data.crop_area=[0.5, 0.9]", "data.flip=true", "sync={kind='allreduce', wire='fp16'}"],
    )
    assert (recipe.epochs, recipe.data.crop_area, recipe.data.flip) == (3, (0.5, 0.9), True)
    assert recipe.sync == AllReduceSync(wire="fp16")


def test_none_is_the_value_of_a_key_that_is_absent():
    recipe = load_recipe("resnet50-8gpu", overrides=["target_top1=none", "first_eval = none"])
    assert (recipe.target_top1, recipe.first_eval) == (None, None)


def test_sync_replaces_the_engine_and_keeps_the_wire_and_dense_epochs_follow_the_warmup():
    demo = find_file("recipe", "demo")
    assert load_recipe(demo, sync="allreduce").sync == AllReduceSync(wire="bf16")
    derived = {"dense_epochs": load_recipe(demo).schedule.warmup_epochs, "momentum": load_recipe(demo).optim.momentum}
    assert load_recipe(demo, sync="sparse").sync == SparseSync(**derived)
    told = load_recipe(demo, sync="sparse", overrides=["sync.dense_epochs=0"]).sync
    assert told == SparseSync(**derived | {"dense_epochs": 0})


def test_an_engine_that_does_not_send_the_recipes_codes_sends_bf16_and_says_so(tmp_path: Path):
    path = tmp_path / "coded.toml"
    path.write_text(tomli_w.dumps(tables(sync={"kind": "lazy", "wire": "int8"})))
    told: list[str] = []
    sent = {kind: load_recipe(path, kind, tell=told.append).sync.wire for kind in engines()}
    assert {kind for kind, wire in sent.items() if wire == "bf16"} == {"sparse", "powersgd", "ddp"}
    assert set(sent.values()) == {"int8", "bf16"}
    assert told[-1] == "--sync ddp does not send in int8, which sync.wire is; it sends in bf16"
    assert len(told) == 3
    assert 'sync.wire is "int8"' in refusal_of(load_recipe, path, overrides=["sync.kind=ddp"])


def test_corrected_momentum_is_the_optimizers_unless_told_otherwise():
    optim = {"kind": "sgd", "lr": 1, "weight_decay": 0, "momentum": 0.8}
    for momentum, expected in ({}, 0.8), ({"momentum": 0.5}, 0.5):
        sync = parse_recipe("my.toml", tables(sync={**CORRECTED, **momentum}, optim=optim)).sync
        assert (sync.momentum, sync.velocity_momentum) == (expected, expected)
    assert SparseSync(momentum_correction=True).velocity_momentum == 0.9
    assert SparseSync(momentum=0.5).velocity_momentum is None


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path):
    broken = tmp_path / "broken.toml"
    for content, sentence in (
        (b"reference_ranks = = 2", f"{broken} cannot be read as TOML"),
        (b"ranks = 2", "broken.toml: unknown key ranks; did you mean reference_ranks?"),
        *(("# größe\n".encode(code), f"{broken} is not UTF-8; save it as UTF-8") for code in ("latin-1", "utf-16")),
    ):
        broken.write_bytes(content)
        assert refusal_of(load_recipe, broken).startswith(sentence)
    assert "no recipe 'dmeo'; did you mean demo" in refusal_of(load_recipe, "dmeo")
    assert "no recipe file nowhere.toml" in refusal_of(load_recipe, "nowhere.toml")
    assert "unknown key 'a\\nb'; " in refusal_of(load_recipe, "demo", overrides=["a\nb=1"]), "on one line"


VALUES = [
    b"nan", b"-inf", b"1e400", b"-1", b"9" * 400, b"9" * 5000, b"[" * 300 + b"]" * 300, b"[" * 5000 + b"]" * 5000,
    b"{}", b"[]", b"''", b"true", b"1979-05-27", b"1e-400", b'"\\u0000"', b"{a.b.c = 1}", b"18446744073709551616",
    b'"' + b"x" * 5000 + b'"',
]  # fmt: skip


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """As disks and people do it."""
    lines = whole.splitlines(keepends=True)
    line = chance.randrange(len(lines))
    key = chance.choice([number for number, text in enumerate(lines) if b"=" in text and not text.startswith(b"#")])
    other = lines[key].partition(b"=")[0] + b"= " + chance.choice(VALUES) + b"\n" * chance.randrange(2)
    return chance.choice([
        *(corrupted(whole, chance) for _ in range(3)),
        b"".join([*lines, lines[line]]),
        b"".join(lines[:line] + lines[line + 1 :]),
        b"".join([*lines[:key], other, *lines[key + 1 :]]),
    ])  # fmt: skip


def test_no_damage_of_200_gives_a_traceback_or_a_recipe_that_is_none(tmp_path: Path):
    path = tmp_path / "damaged.toml"
    refused = 0
    for seed in range(200):
        chance = random.Random(seed)
        path.write_bytes(damaged(find_file("recipe", chance.choice([*shipped("recipe")])).read_bytes(), chance))
        try:
            recipe = load_recipe(path)
        except UserError as error:
            refusal = str(error)
            assert "damaged.toml" in refusal
            assert refusal.isprintable()
            assert len(refusal) < 600
            refused += 1
        else:
            assert parse_recipe("again", tomllib.loads(to_toml(recipe))) == recipe
    assert refused > 100


def test_evaluations_follow_the_epochs_that_a_recipe_says():
    for keys, evaluated in (
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"eval_every": 4}, [4, 8, 10]),
        ({"eval_every": 4, "first_eval": 3}, [3, 7, 10]),
        ({"eval_every": 2, "first_eval": 5}, [5, 7, 9, 10]),
        ({"first_eval": 11}, [10]),
    ):
        recipe = parse_recipe("test", tables(epochs=10, **keys))
        assert [epoch for epoch in range(1, 11) if recipe.evaluates_after(epoch)] == evaluated


def test_a_wrong_override_is_met_in_words_of_toml():
    for override, sentence in (
        ("sync.threshold_mb=16MB", "threshold_mb is \"16MB\": input should be a valid number or 'auto'; correct it"),
        ("compile=True", 'compile is "True": input should be a valid boolean; write true or false'),
        ("optim.lr=.5", "write digits before and after the point, as in 0.5 or 1e-4"),
        ("target_top1=None", "as in 0.5 or 1e-4, or leave it out (KEY=none)"),
        ("first_eval=~", 'first_eval is "~": input should be a valid integer; correct it, or leave it out (KEY=none)'),
        ("sync.max_ctas=null", "correct it, or leave it out (KEY=none)"),
        ("optim.lr=None", "as in 0.5 or 1e-4$"),
        ("model=resnet50", "it is a table, so write model.kind=VALUE"),
        ("timeout=5", "it is a table, so write timeout.KEY=VALUE"),
        ("lr=0.5", "unknown key lr; did you mean optim.lr?"),
        ("sync.collective=foo", "sync.collective is \"foo\": input should be 'native', "),
        ("data.sizes=x", 'data.sizes is "x": input should be a valid '),
        ("timeout.step_s=1e15", "step_s is 1000000000000000.0: input should be less than or equal to 100000000"),
        ("epochs", "epochs is not KEY=VALUE; write for example optim.lr=0.5"),
        ("=3", "=3 is not KEY=VALUE"),
        (".optim.lr=1", ".optim.lr=1 is not KEY=VALUE"),
        ("epochs=none", "epochs cannot be none, which is for keys that may be absent; give it a value, or"),
        ("sync.collective=none", "sync.collective cannot be none, which"),
        ("optim=none", "optim cannot be none, which"),
        ("optim.lrr=none", "unknown key optim.lrr; did you mean optim.lr?"),
        ("epochs.more=3", 'epochs is {"more": 3}: input should be a valid integer; correct it'),
        (f"seed={'9' * 5000}", f'seed is "{"9" * 99} ...: input should be a valid integer; correct it'),
        (f"data.sizes={'[' * 3000}", 'data.sizes is "[[['),
        (os.fsdecode(b"data.dataset=\xff"), "a value in it is not UTF-8, or arrays lie in one another too"),
    ):
        told = refusal_of(load_recipe, "demo", overrides=[override])
        assert sentence in f"{told}$"
        assert not re.search(r"\[_|\.literal\[|constrained|function-", told)


def one(name: str) -> Key:
    (key,) = (key for key in recipe_keys(name) if key.name == name)
    return key


def test_every_key_is_listed_with_a_meaning():
    for key in recipe_keys():
        assert key.meaning.endswith((".", ".)")), key
        assert "``" not in key.meaning, key
    full = tomllib.loads(to_toml(load_recipe("cifar10-94")))
    assert set(flat_tables(full)) <= {key.name for key in recipe_keys()}


def test_types_ranges_and_defaults_are_those_of_the_schema():
    assert one("optim.lr") == Key(
        "optim.lr", (), "number > 0", "required", "Peak learning rate, at the end of the warm-up; above 0."
    )
    assert (one("seed").type, one("seed").default) == ("integer ≥ 0, < 2147483648", "1")
    assert (one("target_top1").type, one("target_top1").default) == ("number > 0, ≤ 100", "absent")
    assert one("data.sizes").type == "list of [number > 0, integer > 0]"
    assert one("sync.sparsity").kinds == ("sparse",)
    assert one("sync.fuse_mb").type == 'number ≥ 0 or "auto"'
    assert one("optim.kind").type == '"sgd", "lars"'
    assert {one(key).default for key in ("sync.kind", "optim.kind", "data.loader")} == {"required"}
    wires = {(key.kinds, key.default) for key in recipe_keys("sync.wire")}
    assert (("allreduce",), '"fp32"') in wires
    assert (("ring", "lazy", "hybrid", "dear", "auto"), '"bf16"') in wires


def test_an_unknown_key_is_refused_with_the_nearest():
    assert "no recipe key begins with 'optin.lr'; did you mean optim.lr" in refusal_of(recipe_keys, "optin.lr")
    assert "`imagenet-fast recipes keys` lists all" in refusal_of(recipe_keys, "§")


ALL: dict[str, SyncTable] = {kind: table() for kind, table in engines().items()}

PROPERTIES: list[tuple[SyncTable, str, str, str]] = [
    (ALL["allreduce"], "'allreduce'", "each", "ours"),
    (ALL["ring"], "'ring'", "backward", "ours"),
    (ALL["lazy"], "'lazy'", "backward", "ours"),
    (LazySync(wire="int8"), "'lazy' in sync.wire 'int8'", "backward", "keeps ours"),
    (ALL["hybrid"], "'hybrid'", "read", "defers ours"),
    (ALL["dear"], "'dear'", "read", "defers ours"),
    (ALL["auto"], "'auto' with sync.defer true", "read", "defers chooses ours"),
    (AutoSync(defer=False), "'auto'", "backward", "chooses ours"),
    (AutoSync(inexact=True), "'auto' with sync.defer true and sync.inexact true", "read", "defers keeps chooses ours"),
    (ALL["sparse"], "'sparse' with sync.timing 'lazy'", "backward", "keeps ours"),
    (SparseSync(timing="hybrid"), "'sparse' with sync.timing 'hybrid'", "read", "defers keeps ours"),
    (ALL["powersgd"], "'powersgd' with sync.timing 'lazy'", "backward", "keeps ours"),
    (PowerSgdSync(timing="allreduce"), "'powersgd' with sync.timing 'allreduce'", "each", "keeps ours"),
    (PowerSgdSync(timing="dear"), "'powersgd' with sync.timing 'dear'", "read", "defers keeps ours"),
    (ALL["ddp"], "'ddp'", "backward", ""),
]
"""Settings, as a recipe writes them, where they wait, and what is true of them."""


def test_an_engine_says_where_it_waits_and_what_it_does():
    for engine, written, awaits, true in PROPERTIES:
        asked = ("defers", "keeps", "chooses", "ours")
        assert engine.as_written == f"sync.kind {written}"
        assert engine.awaits == awaits
        assert [name for name in asked if getattr(engine, name)] == true.split(), written
    assert {engine.kind for engine, *_ in PROPERTIES} == set(ALL)


def test_all_send_everything_but_sparse_and_powersgd_of_matrices():
    assert {kind: engine.share for kind, engine in ALL.items() if engine.share < 1} == {"sparse": 0.125}
    sent = {kind: engine.values_sent((32, 3, 5, 5)) for kind, engine in ALL.items()}
    assert sent == dict.fromkeys(ALL, 2400) | {"sparse": 300, "powersgd": 4 * (32 + 75)}
