"""`aerie train`, from prompts to the folder of a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.cli import main as aerie
from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.train import runtime, train_head
from drafters.train import target as target_module
from drafters.train.data.mix import load_mix
from drafters.train.optimisation.head_init import (
    HeadPlan,
    default_taps,
    mask_token_of,
    new_head,
)
from drafters.train.optimisation.loop import Trainer
from drafters.train.runtime import seconds_of, slow_bfloat16
from drafters.train.target import FrozenTarget
from drafters.train.train_options import learning_rates, train_parser
from tests.drafters.train.conftest import Serve
from tests.drafters.train.tiny import END, write_target

Train = Callable[..., int]
MASK = ("--mask-token", "<|im_end|>")
PROVENANCE = {
    "argv", "seed", "git", "python", "torch", "transformers", "tokenizers", "processors",
    "threads", "method", "target_sha256", "data_sha256", "k_train", "retain", "loss", "rows",
    "tokens", "steps", "minutes", "loss_per_depth",
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines: list[object] = [{"prompt": f"number {i} is"} for i in range(8)]
    lines += [{"messages": [{"role": "user", "content": f"hello {i}"}]} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def train(target_folder: Path, prompts: Path) -> Train:
    """Short runs: of a head of one layer, or on from the one in `init`. They return exit codes."""

    def run(
        out: Path, *options: str, init: Path | None = None, target: Path | str = target_folder
    ) -> int:
        head = ["--layers", "1"] if init is None else ["--init", str(init)]
        return aerie([
            "train", "--target", str(target), "--prompts", str(prompts), "--out", str(out),
            "--response-tokens", "16", "--max-length", "120", "--k-train", "3", "--tokens", "600",
            "--threads", "1", "--device", "cpu", *head, *options,
        ])  # fmt: skip

    return run


def texts_of(head: Path) -> set[str]:
    """The texts of the mix beside a head."""
    return {str(text.tokens.tolist()) for text in load_mix(head)}


def test_a_trained_head_is_trained_on(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(first, *MASK) == 0
    capsys.readouterr()
    shape = ("--layers", "2", "--taps", "1")
    assert train(second, *shape, init=first) == 1
    assert "leave out --layers, --taps" in capsys.readouterr().err
    # Updates that change nothing: what is written is the head that it began as.
    still = ("--tokens", "1", "--muon-lr", "0", "--adam-lr", "0")
    assert train(second, *still, init=first) == 0
    heads = [load_head(folder) for folder in (first, second)]
    assert heads[0].config == heads[1].config
    for name, weight in heads[0].state_dict().items():
        assert torch.equal(weight, heads[1].state_dict()[name]), name
    was, now = (json.loads((f / "provenance.json").read_text()) for f in (first, second))
    assert was["init"] is None and now["init"] == was


def test_a_head_that_is_trained_on_keeps_texts_of_the_first(
    train: Train, prompts: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(first, *MASK, "--tokens", "1") == 0
    prompts.write_text("\n".join(json.dumps({"prompt": f"another {i}"}) for i in range(3)))
    assert train(second, "--tokens", "1", init=first) == 0
    assert len(texts_of(first)) > 1 and texts_of(first) < texts_of(second)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ("", (0.02, 2e-3)),
        ("--init head", (3e-3, 3e-4)),
        ("--init head --selector", (0.02, 2e-3)),
        ("--init head --muon-lr 0 --adam-lr 0.1", (0.0, 0.1)),
    ],
)
def test_a_trained_head_has_lower_learning_rates(options: str, rates: tuple[float, float]) -> None:
    required = ["--target", "t", "--out", "o", "--prompts", "p"]
    args = train_parser(None).parse_args([*required, *options.split()])
    assert learning_rates(args) == rates


def test_a_head_of_another_target_is_not_trained_on(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = HeadConfig(
        vocab_size=9, hidden_size=8, target_hidden_size=8, intermediate_size=8, head_dim=4,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        eagle_aux_hidden_state_layer_ids=(1,), max_position_embeddings=64,
    )  # fmt: skip
    save_head(DraftHead(other, own_embeddings=False), tmp_path / "other")
    assert train(tmp_path / "head", init=tmp_path / "other") == 1
    assert "head for another target" in capsys.readouterr().err
    assert not list((tmp_path / "head.work").glob("responses-*"))


def test_a_head_is_not_written_over_its_target(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_target(tmp_path / "target")
    assert train(target, *MASK, target=target) == 1
    assert "--out is the folder of the target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ([*MASK], "p-eagle"),
        (["--method", "eagle3"], "eagle3"),
        (["--method", "eagle3", "--draft-vocab", "64", "--loss", "distribution"], "eagle3"),
        ([*MASK, "--layout", "speculators"], "p-eagle"),
    ],
    ids=str,
)
def test_a_head_and_its_provenance(
    train: Train, target_folder: Path, tmp_path: Path, options: list[str], method: str
) -> None:
    out = tmp_path / "head"
    assert train(out, *options) == 0
    head = load_head(out)
    assert head.config.method == method
    document = json.loads((out / "config.json").read_text())
    assert ("speculators_model_type" in document) == ("--layout" in options)
    if "--draft-vocab" in options:
        assert len(head.to_target(torch.arange(64)).unique()) == 64
    facts = json.loads((out / "provenance.json").read_text())
    assert facts.keys() >= PROVENANCE
    assert facts["argv"][0] == "aerie train"
    assert facts["tokens"] >= 600
    assert facts["seed"] == 0
    assert len(facts["loss_per_depth"]) == 3
    assert facts["target_sha256"] == FrozenTarget.load(target_folder).fingerprint
    assert len(facts["data_sha256"]) == 64


def test_a_packaged_target_is_named_by_its_folder(
    train: Train, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: `vllm serve HEAD` does not know the name."""
    name, folder = "packaged:tiny", str(target_folder)
    for module in (train_head, target_module):
        monkeypatch.setattr(module, "resolve", lambda given: folder if given == name else given)
    options = (*MASK, "--tokens", "1", "--layout", "speculators")
    assert train(tmp_path / "head", *options, target=name) == 0
    document = json.loads((tmp_path / "head" / "config.json").read_text())
    assert document["speculators_config"]["verifier"]["name_or_path"] == folder


def test_texts_are_not_left_beside_a_head_against_its_makers_will(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = tmp_path / "head" / "mix.jsonl.gz"
    assert train(tmp_path / "head", *MASK, "--tokens", "1") == 0
    assert mix.is_file() and f"{mix} holds texts" in capsys.readouterr().out
    assert train(tmp_path / "head", *MASK, "--tokens", "1", "--no-mix") == 0
    assert not mix.exists() and "holds texts" not in capsys.readouterr().out


def test_a_second_run_reuses_responses_and_goes_on(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, run = tmp_path / "head", Trainer.run

    def killed(self: Trainer, file: Path | None = None, save_every: float = 120.0) -> None:
        run(self, file, 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        train(out, "--method", "eagle3")
    assert not out.exists()
    monkeypatch.setattr(Trainer, "run", run)
    capsys.readouterr()
    assert train(out, "--method", "eagle3") == 0
    printed = capsys.readouterr().out
    assert "16 of 16 are answered already" in printed
    assert "resumed at step" in printed
    assert load_head(out).config.method == "eagle3"


def test_a_run_goes_on_in_the_type_that_it_began_in(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fault: a CPU measured anew which type is faster, and --dtype changed it unseen."""
    target = write_target(tmp_path / "target", dtype=torch.bfloat16)
    out, dtypes = tmp_path / "head", list[torch.dtype]()

    def killed(self: Trainer, file: Path, save_every: float = 120.0) -> None:
        dtypes.append(self.head.fc.weight.dtype)
        self.save(file)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", killed)
    for in_half in (2.0, 0.5):
        seconds = {torch.bfloat16: in_half, torch.float32: 1.0}
        monkeypatch.setattr(runtime, "seconds_of", lambda dtype, side, of=seconds: of[dtype])
        with pytest.raises(KeyboardInterrupt):
            train(out, *MASK, target=target)
    assert dtypes == [torch.float32, torch.float32]
    assert train(out, *MASK, "--dtype", "bfloat16", target=target) == 1
    assert "saved run with other dtype: float32" in capsys.readouterr().err


def test_a_template_that_writes_the_date_asks_nothing_again_on_another_day(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}")
    options = (*MASK, "--tokens", "1", "--chat-template", str(template))
    assert train(tmp_path / "head", *options) == 0
    # The function that transformers gives to templates, on another day.
    formatter = "transformers.utils.chat_template_utils.datetime"
    monkeypatch.setattr(formatter, SimpleNamespace(now=lambda: datetime(2031, 5, 7)))
    capsys.readouterr()
    assert train(tmp_path / "head", *options) == 0
    assert "16 of 16 are answered already" in capsys.readouterr().out


def test_a_target_that_caps_its_logits_teaches_its_distribution(
    train: Train, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target", "gemma2")
    options = ("--loss", "distribution", "--tokens", "50")
    assert train(tmp_path / "head", *MASK, *options, target=target) == 0
    record = json.loads((tmp_path / "head" / "provenance.json").read_text())
    assert record["loss"] == "distribution"


def test_a_killed_run_of_another_head_is_not_taken_up(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, out = tmp_path / "first", tmp_path / "out"
    assert train(first, *MASK, "--tokens", "1") == 0

    def killed(self: Trainer, file: Path, save_every: float = 120.0) -> None:
        self.save(file)
        raise KeyboardInterrupt

    for seed, options in (("9", ()), ("10", ("--selector", "--rank", "4"))):
        more = ("--tokens", "100", *options)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "run", killed)
            with pytest.raises(KeyboardInterrupt):
                train(out, *more, init=first)
        # Another head at the same path.
        assert train(first, *MASK, "--tokens", "1", "--seed", seed) == 0
        capsys.readouterr()
        assert train(out, *more, init=first) == 1
        assert "saved run with other starting weights" in capsys.readouterr().err
        assert train(out, *more, "--restart", init=first) == 0


def test_an_added_prompt_alone_is_answered(
    train: Train, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--method", "eagle3", "--tokens", "1", "--work", str(tmp_path / "work"))
    assert train(tmp_path / "first", *options) == 0
    prompts.write_text('{"prompt": "one more"}\n' + prompts.read_text())
    capsys.readouterr()
    assert train(tmp_path / "second", *options) == 0
    assert "16 of 17 are answered already" in capsys.readouterr().out
    assert texts_of(tmp_path / "first") <= texts_of(tmp_path / "second")


def test_malformed_lines_end_the_run_or_are_left_out(
    train: Train, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text(prompts.read_text() + '\n{"prompt": 3}\n')
    out, eagle3 = tmp_path / "head", ["--method", "eagle3"]
    assert train(out, *eagle3) == 1
    assert f"{prompts}:17" in "".join(capsys.readouterr())
    assert not out.exists()
    assert train(out, *eagle3, "--malformed", "skip") == 0
    assert f"{prompts}:17" in "".join(capsys.readouterr())


def test_what_the_template_refuses_is_malformed_too(
    train: Train, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    turn = {"role": "user", "content": "hello"}
    prompts.write_text(prompts.read_text() + "\n" + json.dumps({"messages": [turn, turn]}))
    out, options = tmp_path / "head", [*MASK, "--chat-template", str(template)]
    assert train(out, *options) == 1
    assert f"{prompts}:17: the chat template refuses it: one turn" in capsys.readouterr().err
    assert train(out, *options, "--malformed", "skip") == 0
    assert f"{prompts}:17" in capsys.readouterr().out


def test_a_run_that_cannot_be_saved_goes_on(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fault: a full disk ended it, by a traceback."""
    out, run = tmp_path / "head", Trainer.run

    def on_a_full_disk(self: Trainer, file: Path, save_every: float = 120.0) -> None:
        file.with_name(f"{file.name}.tmp").symlink_to("/dev/full")
        run(self, file, 0.0)

    monkeypatch.setattr(Trainer, "run", on_a_full_disk)
    assert train(out, *MASK) == 0
    assert "the run is not saved and goes on" in capsys.readouterr().out
    assert load_head(out).config.method == "p-eagle"


@pytest.mark.parametrize("tokens", ["2000", "20000"])
def test_a_run_whose_loss_is_not_finite_writes_nothing(
    train: Train, tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: it went on, and ended with exit code 0 and a head of NaN."""
    out, rates = tmp_path / "head", ("--muon-lr", "1e30", "--adam-lr", "1e30")
    assert train(out, *MASK, *rates, "--tokens", tokens) == 1
    assert "--muon-lr 1e+30 and --adam-lr 1e+30" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "option",
    [
        *("--minutes 0", "--tokens 0", "--epochs 0", "--k-train 0", "--max-length 0"),
        *("--cache-gib -1", "--partitions -1", "--temperature -1", "--muon-lr -1", "--adam-lr nan"),
        *("--retain 0", "--retain 1.1", "--dropout 1.5", "--sampled-share 7"),
    ],
)
def test_numbers_out_of_bounds_are_refused_before_anything_is_loaded(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", "t", "--out", "o", "--prompts", "p", *option.split()]
    with pytest.raises(SystemExit) as refused:
        aerie(["train", *given])
    assert refused.value.code == 2
    assert f"argument {option.split()[0]}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mask-token", "no-such-token"], "no-such-token"),
        (["--method", "eagle3", "--taps", "1", "2", "9"], "taps"),
        (["--method", "eagle3", "--max-length", "17"], "--max-length"),
        (["--method", "eagle3", "--draft-vocab", "1000"], "1000"),
        (["--selector"], "--init"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_a_line(
    train: Train, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And before the target answers any prompt, which takes hours."""
    assert train(tmp_path / "head", *options) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("aerie train: ")
    assert said in error
    assert not list((tmp_path / "head.work").glob("responses-*"))


def test_the_placeholder_is_a_token_that_no_text_has(target: FrozenTarget) -> None:
    rows, named = target.shape.vocab_size, target.tokenizer.get_vocab()
    assert len(target.tokenizer) == rows - 1
    assert mask_token_of(target, None) == rows - 1  # a row that the tokenizer does not use
    assert mask_token_of(target, "<|im_end|>") == named["<|im_end|>"]
    assert mask_token_of(target, "17") == 17
    plain = target.tokenizer
    target.tokenizer = SimpleNamespace(  # ids with a gap: the last one is a token of texts
        mask_token_id=None, get_vocab=lambda: {str(i): i for i in range(rows) if i != 40}
    )
    assert mask_token_of(target, None) == 40
    target.tokenizer = plain
    target.tokenizer.add_special_tokens({"additional_special_tokens": ["<|last|>"]})
    with pytest.raises(ValueError, match="--mask-token"):
        mask_token_of(target, None)
    target.tokenizer.mask_token = "<|last|>"
    assert mask_token_of(target, None) == rows - 1


def test_default_taps_lie_within_the_target() -> None:
    assert default_taps(32) == (2, 16, 29)  # vLLM's for a Llama of 32 layers
    for layers in range(2, 80):
        taps = default_taps(layers)
        assert list(taps) == sorted(set(taps))
        assert 0 < taps[0] <= taps[-1] < layers


@pytest.mark.parametrize(
    ("heads", "of_the_head"), [((4, 2), (4, 2)), ((6, 2), (4, 2)), ((7, 7), (4, 1))]
)
def test_a_head_has_attention_heads_that_vllm_reads(
    target: FrozenTarget, tmp_path: Path, heads: tuple[int, int], of_the_head: tuple[int, int]
) -> None:
    """The fault: of a target such as GLM-4.5, with 96 attention heads at a hidden size of 4096, a
    head was trained whose config.json nothing could read."""
    from vllm.transformers_utils.config import get_config

    target.shape = replace(target.shape, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    head = new_head(target, HeadPlan(method="eagle3"), torch.float32)
    save_head(head, tmp_path)
    assert HeadConfig.load(tmp_path) == head.config
    config = get_config(str(tmp_path), trust_remote_code=False)
    assert (config.num_attention_heads, config.num_key_value_heads) == of_the_head
    assert config.head_dim == target.shape.head_dim


def test_a_head_is_stored_in_the_type_of_its_target(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target", dtype=torch.bfloat16)
    seconds = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr(runtime, "seconds_of", lambda dtype, side: seconds[dtype])
    for name, asked in (("own", ()), ("wide", ("--dtype", "float32"))):
        assert train(tmp_path / name, *MASK, *asked, target=target) == 0
        found = load_head(tmp_path / name).fc.weight.dtype
        assert found == (torch.float32 if asked else torch.bfloat16)


def test_weights_that_stay_in_float16_are_refused(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers loads AWQ in float16 on CUDA, whatever type is asked for."""
    target, load = write_target(tmp_path / "target", dtype=torch.float16), FrozenTarget.load
    monkeypatch.setattr(
        FrozenTarget, "load", lambda name, dtype, device: load(name, dtype=torch.float16)
    )
    assert train(tmp_path / "head", target=target) == 1
    assert "small gradients vanish: give --dtype" in capsys.readouterr().err


def test_types_are_timed_on_a_cpu_alone() -> None:
    """Which of them is then trained in, test_target.py tells."""
    assert 0 < seconds_of(torch.float32, 256) < 5 and 0 < seconds_of(torch.bfloat16, 256) < 5
    assert slow_bfloat16("cuda") is None


@pytest.mark.parametrize(
    ("in_half", "sides", "chosen"),
    [
        ({256: 40.0}, {256}, torch.float32),
        ({256: 0.1}, {256}, None),
        ({256: 2.0, 768: 0.9}, {256, 768}, None),
        ({256: 0.5, 768: 1.1}, {256, 768}, torch.float32),
    ],
)
def test_large_products_are_timed_only_where_small_ones_do_not_tell(
    in_half: dict[int, float],
    sides: set[int],
    chosen: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault: on a processor that emulates bfloat16 every command of training took 4 s more."""
    asked = set()

    def seconds(dtype: torch.dtype, side: int) -> float:
        asked.add(side)
        return in_half[side] if dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(runtime, "seconds_of", seconds)
    assert slow_bfloat16("cpu") == chosen and asked == sides


@pytest.mark.parametrize("server", ["127.0.0.1:8000", "localhost", "ftp://here", "http://"])
def test_a_server_that_is_no_url_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: str
) -> None:
    asked = ["--target", str(tmp_path), "--out", str(tmp_path / "head"), "--prompts", "none.jsonl"]
    with pytest.raises(SystemExit) as refused:
        aerie(["train", *asked, "--server", server])
    assert refused.value.code == 2
    assert "is not a URL such as http://127.0.0.1:8000" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["secret", "", None])
def test_a_server_gets_the_api_key_of_the_environment(
    train: Train, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is None:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    else:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    # A response that ends at once is no text to train on, and so the run ends before training.
    completion = {"choices": [{"text": "", "token_ids": [END]}]}
    server = serve(lambda body, attempt: (200, {}, completion))
    assert train(tmp_path / "head", "--server", server.url) == 1
    sent = {headers.get("Authorization") for headers in server.headers}
    assert sent == {f"Bearer {key}" if key else None}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "config.json"
    }


def test_a_selector_is_trained_for_a_head_that_stays_as_it_is(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, out = tmp_path / "head", tmp_path / "out"
    # A layout that `aerie train` would not write by itself: a published head keeps its own.
    assert train(head, *MASK, "--layout", "speculators") == 0
    was, config = files_of(head), json.loads((head / "config.json").read_text())
    assert train(out, "--selector", "--rank", "4", init=head) == 0
    now = files_of(out)
    assert was == {name: now[name] for name in was}
    assert set(now) - set(was) == {"selector/model.safetensors", "selector/provenance.json"}
    selector = {"kind": "gated", "rank": 4, "candidates": 16}
    assert json.loads((out / "config.json").read_text()) == {**config, "path_selector": selector}
    record = json.loads(now["selector/provenance.json"])
    assert record["path_selector"] == selector and record["tokens"] >= 600
    loaded = load_head(out, target_layers=3)
    assert loaded.selector is not None and loaded.selector.candidate.weight.any()

    # Into the same folder, in the place of the one that is there.
    assert train(out, "--selector", "--rank", "3", init=out) == 0
    again = load_head(out, target_layers=3)
    assert again.selector is not None and again.selector.config.rank == 3
    assert was == {name: files_of(out)[name] for name in was}

    capsys.readouterr()
    assert train(tmp_path / "none", "--selector") == 1
    assert "--selector is for the head of --init" in capsys.readouterr().err


def test_an_eagle3_head_has_no_selector(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    assert train(head, "--method", "eagle3", "--tokens", "1") == 0
    assert train(tmp_path / "out", "--selector", init=head) == 1
    assert "EAGLE-3" in capsys.readouterr().err
