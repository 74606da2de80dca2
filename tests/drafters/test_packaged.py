"""Packaged models: converted once, whole or not at all, and checked at every start."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafters import gguf_conversion, packaged
from drafters.gguf_conversion import convert
from drafters.packaged import MANIFEST, PackagedModel, PackagedModelError, find, resolve
from tests.waiting import until

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

NAME = "packaged:tiny"
SIZE, LAYERS, HEADS, WIDTH = 32, 2, 2, 64
# GPT-2's stand-in for a space, then bytes that stand for themselves; 12 is a merge of its own.
SPACE = "Ġ"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz0123456789.,!?:", "Ċ", SPACE, SPACE + SPACE, "12"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, pre_tokenizer: str = "smollm") -> None:
    """A random Llama of 30,000 parameters as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_dimension_count(SIZE // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([f"{SPACE} {SPACE}", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(1)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32) / 8)

    tensor("token_embd.weight", len(TOKENS), SIZE)
    tensor("output_norm.weight", SIZE)
    for layer in range(LAYERS):
        tensor(f"blk.{layer}.attn_norm.weight", SIZE)
        tensor(f"blk.{layer}.ffn_norm.weight", SIZE)
        tensor(f"blk.{layer}.attn_q.weight", SIZE, SIZE)
        tensor(f"blk.{layer}.attn_k.weight", SIZE // HEADS, SIZE)
        tensor(f"blk.{layer}.attn_v.weight", SIZE // HEADS, SIZE)
        tensor(f"blk.{layer}.attn_output.weight", SIZE, SIZE)
        tensor(f"blk.{layer}.ffn_gate.weight", WIDTH, SIZE)
        tensor(f"blk.{layer}.ffn_up.weight", WIDTH, SIZE)
        tensor(f"blk.{layer}.ffn_down.weight", SIZE, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has one with a tiny model."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "tiny_package").mkdir()
    # As with the real one: whoever imports it is told that llama.cpp is missing.
    (folder / "tiny_package" / "__init__.py").write_text("import llama_cpp_is_not_here\n")
    write_gguf(folder / "tiny_package" / "tiny.gguf")
    information = folder / "tiny_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: tiny-package\nVersion: 1.0\n")
    (information / "LICENSE").write_text("Do as you like.\n")
    return folder


@pytest.fixture(scope="module")
def converted(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, converted in this process."""
    folder = tmp_path_factory.mktemp("converted")
    convert(site / "tiny_package" / "tiny.gguf", folder)
    return folder


@pytest.fixture
def tiny(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The tiny model under the name `packaged:tiny`, and a cache of the test's own."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "SHIPPED", tmp_path / "shipped")
    model = PackagedModel(
        name="tiny",
        distribution="tiny-package",
        version="1.0",
        file="tiny_package/tiny.gguf",
        sha256=hashlib.sha256((site / "tiny_package" / "tiny.gguf").read_bytes()).hexdigest(),
        checkpoint_bytes=1_000_000,
        config={},
    )
    monkeypatch.setitem(packaged.MODELS, "tiny", model)
    return model


@pytest.fixture
def fast(tiny: PackagedModel, converted: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The converter replaced by a copy of its result; the list has a folder for each run."""
    runs: list[Path] = []

    def copy(model: PackagedModel, source: Path, folder: Path, lock: int) -> None:
        runs.append(folder)
        for file in converted.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(packaged, "_run_converter", copy)
    return runs


@pytest.fixture
def here(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """What runs the converter in this process, which has imported what takes a child seconds."""

    def run(command: list[str], **options: object) -> object:
        with redirect_stdout(io.StringIO()) as printed:
            code = gguf_conversion.main(command[-2:])
        return subprocess.CompletedProcess(command, code, printed.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", run)
    return run


def cached() -> list[str]:
    """What lies in the cache, lock files aside."""
    cache = packaged.cache_folder()
    names = sorted(path.name for path in cache.iterdir()) if cache.exists() else []
    return [name for name in names if not name.endswith(".lock")]


def test_any_other_name_stays_as_it_is(tiny: PackagedModel) -> None:
    assert resolve("org/model") == "org/model"
    assert resolve("/models/mine") == "/models/mine"
    with pytest.raises(PackagedModelError, match=r"packaged:none: no such .*known: smollm2-135m"):
        resolve("packaged:none")


def test_a_checkpoint_is_made_by_a_child_and_is_what_the_file_says(
    tiny: PackagedModel, converted: Path
) -> None:
    folder = Path(resolve(NAME))
    assert folder == packaged.cache_folder() / f"tiny-{tiny.sha256[:8]}-v{packaged.CONVERSION}"
    assert cached() == [folder.name]
    assert find(NAME) == folder
    for file in converted.iterdir():  # another process, the same bytes
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["rms_norm_eps"]) == ("bfloat16", 1e-5)
    assert not {"quantization_config", "_name_or_path"} & set(config)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert (folder / "LICENSE").read_text() == "Do as you like.\n"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (len(TOKENS), SIZE)
    # Others may read it: a container converts as root and serves as somebody else.
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in folder.iterdir())


def test_digits_are_split_before_the_merges(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("a  12") == ["a", SPACE + SPACE, "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab  12.")) == "ab  12."
    assert tokenizer.encode("<|im_end|>") == [2]
    assert (tokenizer.model_max_length, tokenizer.eos_token) == (128, "<|im_end|>")


def test_a_pre_tokenizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "qwen2")
    with pytest.raises(ValueError, match="pre-tokenizer is qwen2"):
        convert(tmp_path / "other.gguf", tmp_path)


def test_the_second_time_nothing_is_converted(fast: list[Path]) -> None:
    assert resolve(NAME) == resolve(NAME)
    assert len(fast) == 1


def last_byte_changed(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model.safetensors", last_byte_changed, "model.safetensors is not what was written"),
        ("model.safetensors", lambda content: content[:100], "model.safetensors has 100 bytes"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        (MANIFEST, lambda content: b'{"files": {"config.json"', "manifest.json is damaged"),
        (MANIFEST, None, "manifest.json is missing"),
        (MANIFEST, lambda content: b'{"files": {}}', "manifest.json names no files"),
    ],
)
def test_a_damaged_checkpoint_is_converted_again(
    fast: list[Path],
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[bytes], bytes] | None,
    words: str,
) -> None:
    """A file with other contents, or without the file (None)."""
    folder = Path(resolve(NAME))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / name).unlink()
    if damage is not None:
        (folder / name).write_bytes(damage(before[name]))
    with caplog.at_level(logging.WARNING):
        assert resolve(NAME) == str(folder)
    assert words in caplog.text
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert len(fast) == 2
    assert cached() == [folder.name]


def test_another_converter_has_another_folder(
    fast: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(NAME)
    monkeypatch.setattr(packaged, "CONVERSION", packaged.CONVERSION + 1)
    assert resolve(NAME) != first
    assert len(cached()) == 2


def test_a_copy_beside_the_code_comes_first_and_a_damaged_one_does_not(
    fast: list[Path], tiny: PackagedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """As a container image has it, which its user cannot write to."""
    shipped = Path(resolve(NAME, packaged.SHIPPED))
    assert shipped.parent == packaged.SHIPPED
    assert resolve(NAME) == str(shipped) == str(find(NAME))
    assert cached() == []
    os.truncate(shipped / "model.safetensors", 100)
    assert resolve(NAME).startswith(str(packaged.cache_folder()))
    assert "the cache is used instead" in caplog.text


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_shipped_copy_that_cannot_be_read_is_not_used(
    fast: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    shipped = Path(resolve(NAME, packaged.SHIPPED))
    sha256 = packaged._sha256

    def failing(file: Path) -> str:
        if file.is_relative_to(shipped):
            raise OSError(code, os.strerror(code), str(file))
        return sha256(file)

    monkeypatch.setattr(packaged, "_sha256", failing)
    assert resolve(NAME).startswith(str(packaged.cache_folder()))
    assert f"cannot be read: {os.strerror(code)}; the cache is used instead" in caplog.text


def test_a_place_for_the_shipped_copy_that_cannot_be_entered_is_not_used(
    fast: list[Path], tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, stat = packaged.SHIPPED / tiny.folder_name, os.stat

    def refusing(path: object, *args: object, **options: object) -> os.stat_result:
        if str(path) == str(shipped):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", refusing)
    assert resolve(NAME).startswith(str(packaged.cache_folder()))


def test_a_missing_package_says_how_to_get_it(tiny: PackagedModel) -> None:
    packaged.MODELS["tiny"] = replace(tiny, file="no_such_package/tiny.gguf")
    with pytest.raises(PackagedModelError, match=r"tiny-package is not installed: make install"):
        resolve(NAME)
    packaged.MODELS["tiny"] = replace(tiny, file="tiny_package/other.gguf")
    with pytest.raises(PackagedModelError, match=r"has no tiny_package/other\.gguf"):
        resolve(NAME)
    assert cached() == []


def test_a_damaged_source_is_refused_and_the_last_checkpoint_stays(
    fast: list[Path], tiny: PackagedModel
) -> None:
    packaged.MODELS["tiny"] = other = replace(tiny, sha256="0" * 64)
    with pytest.raises(PackagedModelError, match=r"tiny\.gguf is damaged.*--no-deps tiny-package"):
        resolve(NAME)
    assert fast == []
    assert not (packaged.cache_folder() / other.folder_name).exists()


@pytest.mark.usefixtures("here")
def test_a_file_that_transformers_cannot_read_is_one_line(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned hash of a file that is no GGUF."""
    broken = tmp_path / "broken_package"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "x.gguf").write_bytes(b"GGUF" + b"\xff" * 200)
    monkeypatch.syspath_prepend(str(tmp_path))
    sha256 = hashlib.sha256((broken / "x.gguf").read_bytes()).hexdigest()
    packaged.MODELS["tiny"] = replace(tiny, file="broken_package/x.gguf", sha256=sha256)
    with pytest.raises(PackagedModelError, match=r"x\.gguf cannot be converted: ") as caught:
        resolve(NAME)
    assert "\n" not in str(caught.value)
    assert cached() == []


def test_a_full_disk_under_the_weights_leaves_nothing(
    here: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_full_disk(command: list[str], **options: object) -> object:
        Path(command[-1], "model.safetensors").symlink_to("/dev/full")
        return here(command)

    monkeypatch.setattr(subprocess, "run", on_a_full_disk)
    with pytest.raises(PackagedModelError, match=r"No space left on device: free 1 MB there, or"):
        resolve(NAME)
    assert cached() == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device: free 1 MB there"),
        (errno.EACCES, "Permission denied: let this user read and write there"),
        (errno.EROFS, "Read-only file system: let this user"),
        (errno.EIO, "Input/output error: name another folder"),
    ],
)
def test_what_the_disk_refuses_is_one_line_and_leaves_nothing(
    fast: list[Path], monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def fail(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(packaged, "_flush", fail)
    with pytest.raises(PackagedModelError, match=f"^packaged:tiny: /.*: {words}"):
        resolve(NAME)
    assert cached() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_of_somebody_else(fast: list[Path]) -> None:
    cache = packaged.cache_folder()
    cache.mkdir(parents=True)
    cache.chmod(0o500)
    with pytest.raises(PackagedModelError, match="let this user read and write there"):
        resolve(NAME)


def test_a_file_where_the_cache_should_be(fast: list[Path]) -> None:
    packaged.cache_folder().parent.parent.mkdir(parents=True)
    packaged.cache_folder().parent.touch()
    with pytest.raises(PackagedModelError, match=r"/cache/aerie.*: (Not a directory|File exists)"):
        resolve(NAME)


def test_without_the_converters_packages_the_line_names_them(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that sees no site-packages."""
    run = subprocess.run

    def bare(command: list[str], **options: object) -> object:
        return run([command[0], "-S", *command[1:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", bare)
    with pytest.raises(PackagedModelError, match=r"packages are missing \(.*gguf.*\): make clean"):
        resolve(NAME)
    assert cached() == []


def test_two_at_once_convert_once(
    fast: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Locks are of open files, so two threads stand for two processes."""
    inner, begun = packaged._run_converter, threading.Event()

    def slow(model: PackagedModel, source: Path, folder: Path, lock: int) -> None:
        begun.set()
        until(lambda: "waiting for it" in caplog.text)
        inner(model, source, folder, lock)

    monkeypatch.setattr(packaged, "_run_converter", slow)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(2) as pool:
        first = pool.submit(resolve, NAME)
        assert begun.wait(60)
        second = pool.submit(resolve, NAME)
        assert first.result() == second.result()
    assert len(fast) == 1


@pytest.fixture
def resolver(
    tiny: PackagedModel, site: Path, tmp_path: Path
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that resolves `packaged:tiny` with a converter that runs `code`."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        (tmp_path / "stand_in.py").write_text(f"import os, sys, time\n{code}\n")
        program = (
            "import dataclasses, sys\nfrom pathlib import Path\nfrom drafters import packaged\n"
            f"sys.path.insert(0, {str(site)!r})\n"
            f"packaged.SHIPPED = Path({str(tmp_path / 'shipped')!r})\n"
            f"packaged.ROOT, packaged.CONVERTER = Path({str(tmp_path)!r}), 'stand_in'\n"
            "model = packaged.MODELS['smollm2-135m']\n"
            "packaged.MODELS['tiny'] = dataclasses.replace(model, name='tiny', "
            f"file={tiny.file!r}, sha256={tiny.sha256!r})\n"
            "print(packaged.resolve('packaged:tiny'), flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, process_group=0,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_kill_in_the_middle_leaves_nothing_that_counts(
    resolver: Callable[[str], subprocess.Popen[str]],
    fast: list[Path],
    tiny: PackagedModel,
) -> None:
    process = resolver("open(sys.argv[2] + '/config.json', 'w').close(); time.sleep(60)")
    cache = packaged.cache_folder()
    until(lambda: bool(list(cache.glob(".tiny-*/config.json"))))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert find(NAME) is None
    (left,) = cached()
    assert left == f".{tiny.folder_name}.{process.pid}"
    assert resolve(NAME) == str(cache / tiny.folder_name)
    assert cached() == [tiny.folder_name]


def test_a_converter_that_outlives_its_parent_is_waited_for(
    resolver: Callable[[str], subprocess.Popen[str]], fast: list[Path]
) -> None:
    """Otherwise its folder would be taken away under it."""
    process = resolver(
        "open(sys.argv[2] + '/begun', 'w').close(); time.sleep(2)\n"
        "open(sys.argv[2] + '/still', 'w').close()\n"
        f"open({str(packaged.cache_folder().parent)!r} + '/ended', 'w').close()"
    )
    cache = packaged.cache_folder()
    until(lambda: bool(list(cache.glob(".tiny-*/begun"))))
    process.kill()  # the parent alone
    process.wait()
    resolve(NAME)
    assert (cache.parent / "ended").exists()
    assert len(cached()) == 1


def test_a_converter_that_is_killed_is_an_error(
    resolver: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = resolver("os.kill(os.getpid(), 9)")
    _, said = process.communicate(timeout=60)
    assert "was ended by SIGKILL: start again" in said.splitlines()[-1]
    assert cached() == []


def test_the_command_makes_it_where_it_is_told(
    fast: list[Path], tiny: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packaged.main(["tiny", "--into", str(tmp_path / "image")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "image" / tiny.folder_name)
    packaged.MODELS["tiny"] = replace(tiny, sha256="1" * 64)
    assert packaged.main(["tiny"]) == 1
    assert capsys.readouterr().err.startswith("aerie: packaged:tiny: ")


@pytest.mark.slow
def test_the_packaged_default_converts_and_tokenizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packaged.MODELS["smollm2-135m"]
    try:
        model.source()
    except PackagedModelError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(packaged, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(resolve("packaged:smollm2-135m"))
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert model.checkpoint_bytes - 2_000_000 < size <= model.checkpoint_bytes
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in model.config} == dict(model.config)
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is True
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 100000.0
    assert "Apache License" in (folder / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 49152
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.model_max_length == 8192
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
