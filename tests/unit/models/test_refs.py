"""From what is typed to a file; models of other tools are found where they lie."""

import json
import os
import shutil
from pathlib import Path

import ggufs
import pytest

from specllama import paths
from specllama.errors import ModelUnavailable, UsageError
from specllama.models import judgement, library, refs
from specllama.models.catalog import HubRef
from specllama.models.gguf import read_header

pytestmark = pytest.mark.usefixtures("nobody_else")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ggufs.write_llama(tmp_path / "some-Q4_0.gguf", quant="Q4_0")


def put(model: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(model, target)
    return target


def test_tiny_is_the_bundled_pair() -> None:
    target, draft = refs.resolve_pair("tiny")
    assert target == paths.bundled_dir() / "tiny-target-q4_0.gguf"
    assert draft == paths.bundled_dir() / "tiny-draft-q8_0.gguf"
    assert refs.resolve_pair("tiny-target", "tiny") == (target, draft)
    assert refs.resolve_pair("tiny", "none") == (target, None)
    assert refs.resolve_pair(str(target)) == (target, draft)
    assert refs.resolve("tiny-draft") == draft


def test_a_path_is_a_path(model: Path, tmp_path: Path) -> None:
    assert refs.resolve(str(model)) == model
    assert refs.resolve_pair(str(model)) == (model, None)
    assert refs.resolve(str(tmp_path)) == model  # the only one in its folder
    ggufs.write_llama(tmp_path / "other.gguf")
    with pytest.raises(UsageError, match="2 models"):
        refs.resolve(str(tmp_path))


def test_a_missing_path_suggests_its_neighbours(model: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such file") as caught:
        refs.resolve(str(model.with_name("some-Q4_1.gguf")))
    assert "some-Q4_0.gguf" in (caught.value.hint or "")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("ref", ["", "a\nb", "\x1b[2J", "/x/\ud800.gguf", "/x\0y.gguf"])
def test_nonsense_is_refused(ref: str) -> None:
    with pytest.raises(UsageError) as caught:
        refs.resolve(ref)
    assert repr(ref) in caught.value.message or not ref


NAMES = (
    "a\u3000b", "a\u00a0b", "a\u202fb", "a\u2009b", "a\u1680b", "a\u200bb", "a\u00adb", "a\ue000b",
    "\U0001f469\u200d\U0001f467", "Cafe\u0301", "a\u200fb", "a\u202eb", "a\u2028b", "a\u2029b",
    "\ufeffa", "\u2764\ufe0f", "\U0001f3f4\U000e0067\U000e007f", "a\u0378b", "a\ufffeb", " a ",
    "-rf", "~me", "[a]*?", "a%20b#c?d", "a:b", "a..b", "a\nb", "a\x1b[31mb",
    os.fsdecode(b"caf\xe9"),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_may_have_any_name_that_people_have(model: Path, tmp_path: Path, name: str) -> None:
    file = put(model, tmp_path / "all" / name / f"{name}.GGUF")
    for ref in (file, file.parent):
        assert refs.resolve(str(ref)) == file
    assert [found.path for found in library.scan_folder(tmp_path / "all")] == [file]
    assert [found.path for found in library.beside(file)] == [file]
    assert read_header(file).path == file


@pytest.mark.parametrize("depth", [1, 3])
def test_names_of_hub_files_hold_no_controls(depth: int) -> None:
    assert refs.parse_hub("user/repo/" + "\u3000/" * depth + "x.gguf") is not None
    with pytest.raises(UsageError, match="not a file name"):
        refs.parse_hub("user/repo/" + "\x1b/" * depth + "x.gguf")


def test_near_files_are_found_whatever_their_case_spaces_and_marks(model: Path) -> None:
    there = put(model, model.parent / "near" / "Mod\u00a0Caf\u00e9.gguf")
    with pytest.raises(ModelUnavailable) as caught:
        refs.resolve(str(there.with_name("MOD CAFE\u0301.GGUF")))
    assert caught.value.hint == f"did you mean {there}?"


def test_dead_links_name_their_target(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").symlink_to("/gone/y.gguf")
    (tmp_path / "models").symlink_to("/gone/models")
    for ref, link, target in (
        ("x.gguf", "x.gguf", "/gone/y.gguf"),
        ("", "x.gguf", "/gone/y.gguf"),
        ("models/deep/z.gguf", "models", "/gone/models"),
    ):
        with pytest.raises(ModelUnavailable) as caught:
            refs.resolve(str(tmp_path / ref))
        assert caught.value.message == f"{tmp_path / link} is a link to {target}, which is gone"
    with pytest.raises(ModelUnavailable, match="is a link to /gone/y"):
        read_header(tmp_path / "x.gguf")


def test_a_folder_may_be_called_as_a_file_or_as_a_repository(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "dir.gguf").mkdir(parents=True)
    for ref in ("a/dir.gguf", "./a/dir.gguf", str(tmp_path / "a" / "dir.gguf")):
        with pytest.raises(ModelUnavailable, match="is a folder without a GGUF model in it"):
            refs.resolve(ref)
    file = put(model, Path("a/dir.gguf/m.gguf"))
    assert refs.resolve("a/dir.gguf") == refs.resolve("a/") == file


def test_junk_of_other_systems_is_no_model_and_no_example(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    file = put(model, folder / "model.gguf")
    for name in ("._model.gguf", ".hidden.gguf", "Thumbs.db", ".DS_Store", "desktop.ini"):
        (folder / name).write_bytes(b"\0\5\26\7 junk")
    for name in ("$RECYCLE.BIN", ".Trash-1000"):
        put(model, folder / name / "gone.gguf")
    (folder / "empty.gguf").touch()
    assert [found.path for found in library.scan_folder(folder)] == [file]
    assert [found.path for found in library.beside(file)] == [file]
    assert refs.resolve(str(folder)) == file
    (folder / "damaged.gguf").write_bytes(b"GGUF")
    assert refs.resolve(str(folder)) == file
    other = put(model, folder / "below" / "other.gguf")
    with pytest.raises(UsageError, match="holds 2 models") as caught:
        refs.resolve(str(folder))
    assert caught.value.hint in (f"name one, for example: {one}" for one in (file, other))


def test_any_part_opens_the_whole(tmp_path: Path) -> None:
    parts = ggufs.write_split(tmp_path / "big-Q4_0.gguf")
    assert {refs.resolve(str(part)) for part in parts} == {parts[0]}
    pulled = [put(part, paths.models_dir() / "user" / "repo" / part.name) for part in parts]
    assert {refs.resolve(f"user/repo/{part.name}") for part in parts} == {pulled[0]}
    (tmp_path / "part").mkdir()
    alone = shutil.move(parts[1], tmp_path / "part" / parts[1].name)
    with pytest.raises(ModelUnavailable, match=f"parts are missing .{parts[0].name}"):
        read_header(refs.resolve(str(alone)))


def test_pulled_models(model: Path) -> None:
    folder = paths.models_dir() / "Maker" / "Some-GGUF"
    small = put(model, folder / "some-Q4_0.gguf")
    large = put(model, folder / "some-Q8_0.gguf")
    put(model, folder / "mmproj-some-F16.gguf")
    assert refs.resolve("Maker/Some-GGUF:Q8_0") == large
    assert refs.resolve("maker/some-gguf:q8_0") == large
    assert refs.resolve("hf://Maker/Some-GGUF:Q4_0") == small
    assert refs.resolve("Maker/Some-GGUF") == small  # 4 bits when nothing is said
    assert refs.resolve("Maker/Some-GGUF/some-Q8_0.gguf") == large
    with pytest.raises(ModelUnavailable, match=r"here are: ") as caught:
        refs.resolve("Maker/Some-GGUF:Q6_K")
    assert caught.value.hint == "get it with: specllama hub pull Maker/Some-GGUF:Q6_K"


def test_what_is_not_here_comes_with_the_pull_command() -> None:
    with pytest.raises(ModelUnavailable) as caught:
        refs.resolve("qwen3-8b")
    assert caught.value.hint == "get it with: specllama hub pull qwen3-8b"
    with pytest.raises(ModelUnavailable) as caught:
        refs.resolve("qwen3-8c")
    assert "qwen3-8b" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "ref", ["user/repo/../../x.gguf", "user/repo/a//b.gguf", "user/repo/c:d.gguf"]
)
def test_file_names_that_would_leave_their_repository(ref: str) -> None:
    with pytest.raises(UsageError, match="not a file name"):
        refs.parse_hub(ref)


@pytest.mark.parametrize("ref", ["/abs/path", "../up/x", "a", "a/b/c", "a\\b", "-x/y", "a/b:c/d"])
def test_what_is_no_hub_reference(ref: str) -> None:
    assert refs.parse_hub(ref) is None


def test_hub_references() -> None:
    assert refs.parse_hub("a/b") == HubRef("a/b")
    assert refs.parse_hub("a/b:Q4_K_M") == HubRef("a/b", "Q4_K_M")
    assert refs.parse_hub("a/b/sub/c.gguf") == HubRef("a/b", file="sub/c.gguf")
    assert refs.parse_hub("https://huggingface.co/a/b") == HubRef("a/b")


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.Q8_0.gguf", "Q8_0"),
        ("tiny-target-q4_0.gguf", "Q4_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("x-IQ4_XS-00001-of-00002.gguf", "IQ4_XS"),
        ("llama-fp16.gguf", "F16"),
        ("UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("qwen3-8b.gguf", None),
        ("Q4ever.gguf", None),
    ],
)
def test_quants_in_file_names(name: str, quant: str | None) -> None:
    assert library.quant_of(name) == quant


# -- other tools -----------------------------------------------------------------------------------


def test_the_hugging_face_cache(model: Path, nobody_else: Path) -> None:
    repo = nobody_else / ".cache/huggingface/hub/models--maker--some-GGUF"
    blob = put(model, repo / "blobs" / ("a" * 64))
    snapshot = repo / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "some-Q4_0.gguf").symlink_to(blob)
    outside = nobody_else / "secret.gguf"
    outside.write_bytes(b"x" * 100)
    (snapshot / "leak-Q8_0.gguf").symlink_to(outside)
    (snapshot / "gone-Q8_0.gguf").symlink_to(repo / "nowhere")
    found = library.scan(include_bundled=False)
    assert [(m.ref, m.source) for m in found] == [("maker/some-GGUF:Q4_0", "huggingface")]
    assert refs.resolve("maker/some-GGUF").resolve() == blob.resolve()
    assert not found[0].owned


def test_ollama(model: Path, nobody_else: Path) -> None:
    root = nobody_else / ".ollama/models"
    digest = "b" * 64
    blob = put(model, root / "blobs" / f"sha256-{digest}")
    manifest = root / "manifests/registry.ollama.ai/library/llama3.2/3b"
    manifest.parent.mkdir(parents=True)

    def write(value: str) -> None:
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": value}
        manifest.write_text(json.dumps({"layers": [{"mediaType": "x"}, layer]}))

    write(f"sha256:{digest}")
    assert refs.resolve("llama3.2:3b") == blob
    for hostile in ("sha256:../../../../etc/passwd", "", "sha256:" + "B" * 64, "md5:0"):
        write(hostile)
        assert library.scan(include_bundled=False) == []
    manifest.write_text("not json")
    assert library.scan(include_bundled=False) == []


def test_lm_studio_llama_cpp_and_folders(
    model: Path, nobody_else: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(model, nobody_else / ".lmstudio/models/maker/lm-GGUF/lm-Q4_0.gguf")
    put(model, nobody_else / ".cache/llama.cpp/maker_some_x-Q4_0.gguf")
    put(model, tmp_path / "mine/deep/own.gguf")
    monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", str(tmp_path / "mine"))
    sources = {m.source: m for m in library.scan(include_bundled=False)}
    assert set(sources) == {"lmstudio", "llama.cpp", "folder"}
    assert sources["lmstudio"].ref == "maker/lm-GGUF:Q4_0"
    assert refs.resolve("maker/lm-GGUF").name == "lm-Q4_0.gguf"
    assert sources["folder"].path.name == "own.gguf"


def test_what_was_opened_by_its_path_is_known_from_then_on(
    model: Path, nobody_else: Path, tmp_path: Path
) -> None:
    draft = put(model, tmp_path / "elsewhere/draft-Q4_0.gguf")
    library.remember(model, None)
    library.remember(model, draft)
    library.remember(model, None)
    assert library.opened() == [(model, None), (model, draft)]
    library.remember(put(model, tmp_path / ".copy.gguf"), None)
    assert library.opened() == [(model, None), (model, draft)], "hidden: no model of a person's"
    library.remember(put(model, tmp_path / os.fsdecode(b"\xe9.gguf")), None)
    assert library.opened() == [(model, None), (model, draft)], "the others stay known"
    assert {m.path for m in library.scan(include_bundled=False)} == {model, draft}
    draft.unlink()  # and nobody asks for what is gone
    assert library.opened() == [(model, None)]
    (paths.data_dir() / "opened.json").write_text('[["a", 1]]')
    assert library.opened() == []


def test_what_lies_beside_a_file_is_found_with_it(
    model: Path, nobody_else: Path, tmp_path: Path
) -> None:
    target = put(model, tmp_path / "pair/target-Q4_0.gguf")
    beside = put(model, tmp_path / "pair/draft-Q4_0.gguf")
    assert {m.path for m in library.scan(include_bundled=False, near=target)} == {target, beside}
    tried = judgement.candidates(target, str(target), [])
    assert beside in [one.path for one in tried]
    assert target not in [one.path for one in tried]


def test_links_that_leave_a_store_are_ignored_and_those_of_a_named_folder_are_not(
    model: Path, tmp_path: Path
) -> None:
    for folder in (tmp_path / "mine", paths.models_dir() / "user" / "repo"):
        folder.mkdir(parents=True)
        (folder / "link.gguf").symlink_to(model)
    assert [found.path.name for found in library.scan_folder(tmp_path / "mine")] == ["link.gguf"]
    assert refs.resolve(str(tmp_path / "mine")).name == "link.gguf"
    assert "user/repo/link.gguf" not in [found.ref for found in library.scan()]


def test_split_models_are_one_entry(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    parts = ggufs.write_split(folder / "big-Q4_0.gguf")
    (found,) = library.scan_folder(folder)
    assert found.path == parts[0]
    assert found.bytes == sum(part.stat().st_size for part in parts)
    parts[1].unlink()
    assert not library.scan_folder(folder)[0].complete


def test_summaries_are_cached_and_follow_the_file(model: Path, tmp_path: Path) -> None:
    from specllama.models.judgement import list_models
    from specllama.models.summaries import Summaries

    first = Summaries()
    assert first.get(model).quantization == "Q4_0"
    first.save()
    again = Summaries()
    assert str(model) in again._known
    model.write_bytes(b"<html>")
    assert "web page" in again.get(model).reason
    (paths.cache_dir() / "headers.json").write_text("{broken")
    assert Summaries().get(model).reason

    odd = model.rename(tmp_path / os.fsdecode(b"no UTF-8 \xff.gguf"))
    (other := Summaries()).get(odd)
    other.save()
    assert str(odd) in Summaries()._known

    big = ggufs.write_llama(tmp_path / "lib/big.gguf".replace("lib/", ""), width=256, blocks=4)
    small = ggufs.write_llama(tmp_path / "small.gguf")
    listed = {
        item.model.path: item.drafts for item in list_models(map(library.single, (big, small)))
    }
    assert listed[big] == (str(small),)
    assert listed[small] == ()
    half = ggufs.write_llama(tmp_path / "half.gguf", width=256, blocks=2)  # large, but it fits
    both = list_models(map(library.single, (big, half)))
    assert [item.drafts for item in both] == [(str(half),), ()]


def test_a_path_is_made_to_last_and_other_references_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").touch()  # the bundled pair comes before a file of its name
    (tmp_path / "user/repo").mkdir(parents=True)  # and a repository before a folder
    (tmp_path / "m.gguf").touch()
    (tmp_path / "folder").mkdir()
    for ref in ("tiny", "user/repo", "qwen3-8b", "user/repo:Q4_0", "missing.gguf", "name:tag"):
        assert refs.lasting(ref) == ref
    for ref in ("m.gguf", "./m.gguf", "folder/../m.gguf", "~/m.gguf"):
        assert refs.lasting(ref) == str(tmp_path / "m.gguf")
    assert refs.lasting("folder") == str(tmp_path / "folder")


@pytest.mark.parametrize("ref", ["tiny", "tiny-target"])
def test_the_bundled_pair_is_known_by_name_and_by_path(ref: str) -> None:
    assert refs.is_bundled(ref)
    assert refs.is_bundled(str(refs.resolve(ref)))
    assert not refs.is_bundled("/elsewhere/tiny-target-q4_0.gguf")
    assert not refs.is_bundled("someone/tiny")
