"""`diff`: what one store has and another lacks, and the commands that close the differences."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

import hicachectl
from hicachectl.__main__ import run
from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.cli.group import cli
from hicachectl.cli.parameters import options_of
from hicachectl.formats.profile import dump_profile
from tests.move.migrations import MODEL, PAGES, demo_store, profile_file
from tests.served_stores import HYBRID, OTHER_WEIGHTS, age, served_store, swap_ranks
from tests.stores import contents, page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def a(tmp_path: Path) -> Path:
    """The demo's pages, too old to be in flight."""
    store = demo_store(tmp_path / "a")
    age(store)
    return store


@pytest.fixture
def b(a: Path, tmp_path: Path) -> Path:
    """A copy."""
    return shutil.copytree(a, tmp_path / "b")


def objects(store: Path) -> list[list[Path]]:
    """Return the objects of each page."""
    names = sorted(path.name for path in store.glob("*.bin"))
    pages = dict.fromkeys(name[:64] for name in names)
    return [sorted(store.glob(f"{one}*")) for one in pages]


def overwrite(path: Path) -> None:
    """Change a byte of an object, and keep its times."""
    facts, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def truncate(path: Path) -> None:
    facts = path.stat()
    os.truncate(path, facts.st_size - 1)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def make_differ(a: Path, b: Path) -> dict[str, str]:
    """Make a page of each kind; return the kinds of the pages."""
    pages = objects(b)
    for path in pages[0]:
        path.unlink()
    for path in objects(a)[1]:
        path.unlink()
    pages[2][0].unlink()
    (a / pages[3][0].name).unlink()
    truncate(pages[4][0])
    overwrite(pages[5][1])
    kinds = ["only-in-a", "only-in-b", "incomplete", "incomplete", "size", "bytes"]
    return {page[0].name[:64]: kind for page, kind in zip(pages, kinds, strict=False)}


def kinds_of(document: dict[str, Any]) -> dict[str, str]:
    return {row["page"]: row["difference"] for row in document["differences"]}


def test_equal_stores(invoke: Invoke, a: Path, b: Path) -> None:
    before = contents(a), contents(b)
    said = invoke("diff", a, b)
    assert f"{PAGES} pages equal (names and sizes, bytes not read); 0 different" in said.stdout
    assert said.stderr == ""
    said = invoke("diff", a, b, "--verify")
    assert f"{PAGES} pages equal (names, sizes and bytes, " in said.stdout
    document = invoke.document("diff", a, b, "--verify")
    assert document["bytes_compared"] == sum(len(data) for data, _ in before[0].values())
    assert (document["differences"], document["next"]) == ([], [])
    assert [one["pages"] for one in document["sums"]] == [PAGES]
    assert (contents(a), contents(b)) == before
    assert not (a / ".hicachectl").exists()
    assert invoke("-q", "diff", a, b) == ("", "")


@pytest.mark.parametrize("side", ["a", "b"])
def test_sizes_that_a_store_does_not_tell_are_said(
    invoke: Invoke, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """As 3FS without a profile: the objects may differ all the same."""
    truncate(objects(b)[0][0])
    scan, silent = FileStore.scan, f"file://{a if side == 'a' else b}"

    def without_sizes(store: FileStore, *arguments: Any, **options: Any) -> Any:
        for batch in scan(store, *arguments, **options):
            at = batch.schema.get_field_index("nbytes")
            nothing = pa.nulls(len(batch), pa.int64())
            yield batch.set_column(at, "nbytes", nothing) if store.url == silent else batch

    monkeypatch.setattr(FileStore, "scan", without_sizes)
    said = invoke("diff", a, b).stderr
    assert f"Compared by names alone: {PAGES} pages with objects of unknown size" in said


def test_each_kind_of_difference(invoke: Invoke, a: Path, b: Path) -> None:
    kinds = make_differ(a, b)
    before = contents(a), contents(b)
    document = invoke.document("diff", a, b, "--verify", exit_code=4)
    assert kinds_of(document) == kinds
    counts = ("equal", "only_in_a", "only_in_b", "different", "in_flight", "gone", "not_compared")
    assert [document[name] for name in counts] == [PAGES - 6, 1, 1, 4, 0, 0, 0]
    rows = {row["page"]: row for row in document["differences"]}
    only_a, only_b, lacks_b, lacks_a, size, other = (rows[one] for one in kinds)
    assert (only_a["state_a"], only_a["state_b"], only_a["nbytes_b"]) == ("whole", None, 0)
    assert (only_b["state_a"], only_b["state_b"], only_b["nbytes_a"]) == (None, "whole", 0)
    assert (lacks_b["lacking_a"], lacks_b["lacking_b"], lacks_b["state_b"]) == (0, 1, "partial")
    assert (lacks_a["lacking_a"], lacks_a["lacking_b"], lacks_a["state_a"]) == (1, 0, "partial")
    assert size["key"].encode() == objects(b)[3][0].name.encode()
    assert size["nbytes_a"] == size["nbytes_b"] + 1
    assert other["key"].startswith(other["page"])
    assert contents(a)[other["key"]] != contents(b)[other["key"]]
    assert (contents(a), contents(b)) == before


def test_bytes_are_compared_only_if_asked(invoke: Invoke, a: Path, b: Path) -> None:
    overwrite(objects(b)[0][0])
    assert "bytes not read" in invoke("diff", a, b).stdout
    said = invoke("-q", "diff", a, b, "--verify", exit_code=4)
    assert "; 1 different" in said.stdout


@pytest.mark.slow
def test_the_commands_close_the_differences(
    invoke: Invoke, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_differ(a, b)
    monkeypatch.chdir(tmp_path)
    options = ("--verify", "--grace", "0s", "--profile", profile_file(tmp_path / "p.toml"))
    missing, also_missing, contested = invoke.document("diff", "a", "b", *options, exit_code=4)[
        "next"
    ]
    assert missing["text"] == "2 pages that B lacks, or has in part"
    assert also_missing["text"] == "2 pages that A lacks, or has in part"
    assert contested["text"].startswith("2 pages whose objects differ")
    profile = f"--profile {tmp_path}/p.toml"
    assert missing["commands"] == [f"hicachectl migrate a b --grace 0s {profile}"]
    assert also_missing["commands"] == [f"hicachectl migrate b a --grace 0s {profile}"]
    for closing, differing in ((missing, 4), (also_missing, 2)):
        run_all(closing["commands"], exit_codes={0, 4})  # contested pages may be in conflict
        document = invoke.document("diff", "a", "b", *options, exit_code=4)
        assert len(document["differences"]) == differing
    run_all(contested["commands"], exit_codes={0, 4})
    assert invoke.document("diff", "a", "b", *options)["equal"] == PAGES


def run_all(commands: list[str], *, exit_codes: set[int]) -> None:
    """Run commands as a shell would."""
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "hicachectl"
        assert run(words) in exit_codes


def test_pages_that_are_not_whole_are_said_with_the_option_that_copies_them(
    invoke: Invoke, a: Path, b: Path
) -> None:
    for path in objects(b)[0]:
        path.unlink()
    objects(a)[0][0].unlink()
    (closing,) = invoke.document("diff", a, b, exit_code=4)["next"]
    assert closing["text"].endswith("B lacks, or has in part, 1 of them not whole in A")
    assert closing["commands"] == [f"hicachectl migrate {a} {b} --include-partial"]
    run_all(closing["commands"], exit_codes={0})
    invoke("diff", a, b)


@pytest.mark.slow
def test_the_way_back_of_a_conversion(invoke: Invoke, a: Path, tmp_path: Path) -> None:
    two, one = profile_file(tmp_path / "2.toml"), profile_file(tmp_path / "1.toml", tp(1))
    invoke("migrate", a, tmp_path / "b", "--profile", two, "--to-tp", 1)
    b = tmp_path / "b"
    short = ("diff", a, b, "--profile", two, "--to-tp", 1)
    assert invoke.document(*short, "--verify")["equal"] == PAGES
    assert invoke.document("diff", b, a, "--profile", one, "--to-tp", 2)["equal"] == PAGES
    for path in objects(a)[0]:
        path.unlink()
    (closing,) = invoke.document(*short, exit_code=4)["next"]
    assert closing == {
        "text": "1 page that A lacks, or has in part; for a command that copies them, give "
        "--to-profile, not other --to options",
        "commands": [],
    }
    long = ("diff", a, b, "--profile", two, "--to-profile", one)
    (closing,) = invoke.document(*long, exit_code=4)["next"]
    assert closing["commands"] == [f"hicachectl migrate {b} {a} --to-profile {two} --profile {one}"]
    run_all(closing["commands"], exit_codes={0})
    assert invoke.document(*long, "--verify")["equal"] == PAGES


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 2, 1])
def test_pages_of_another_tp_size_are_converted(
    invoke: Invoke, a: Path, tmp_path: Path, given: int | None
) -> None:
    """The command repeats a profile of the pages that it copies, and no other profile."""
    b, sizes = tmp_path / "b", (2, 1)
    files = {size: profile_file(tmp_path / f"{size}.toml", tp(size)) for size in sizes}
    invoke("migrate", a, b, "--profile", files[2], "--to-tp", 1)
    profile = () if given is None else ("--profile", files[given])
    closings = invoke.document("diff", a, b, *profile, "--grace", "0s", exit_code=4)["next"]
    for closing, name, size, other in zip(closings, "BA", sizes, sizes[::-1], strict=True):
        assert closing["text"].startswith(
            f"{PAGES} pages of {MODEL} tp {size} that {name} lacks. {name} has {MODEL} tp {other}, "
            "whose servers cannot read plain copies; "
        )
        assert ("their profile as FILE" in closing["text"]) is (given != size)
        (command,) = closing["commands"]
        words = shlex.split(command.replace("FILE", str(files[size])))
        assert words[:4] == ["hicachectl", "migrate", *map(str, (a, b) if name == "B" else (b, a))]
        wanted = {"--profile": str(files[size]), "--grace": "0s", "--to-tp": str(other)}
        assert dict(zip(words[4::2], words[5::2], strict=True)) == wanted
        for path in (b if name == "B" else a).glob("*.bin"):
            path.unlink()
        run_all([shlex.join(words)], exit_codes={0})
    assert invoke.document("diff", a, b, "--profile", files[2], "--to-tp", 1)["equal"] == PAGES


def test_pages_of_other_sizes_than_tp_get_no_command(invoke: Invoke, tmp_path: Path) -> None:
    """No single option converts them. Pages of another model are copied as they are."""
    a, b = tmp_path / "a", tmp_path / "b"
    put_pages(a, range(3), "_m_0_2_2_0", "_m_0_2_2_1", "_m_1_2_2_0", "_m_1_2_2_1")
    put_pages(a, range(2), "_other_0_2", "_other_1_2")
    put_pages(b, range(3), "_m_0_2", "_m_1_2")
    plain, staged, back = invoke.document("diff", a, b, exit_code=4)["next"]
    assert plain["text"] == "2 pages that B lacks, or has in part"
    assert plain["commands"] == [f"hicachectl migrate {a} {b}"]
    assert staged == {
        "text": "3 pages of m tp 2 pp 2 that B lacks. B has m tp 2, whose servers cannot read "
        "plain copies",
        "commands": [],
    }
    assert back["commands"] == []


def test_the_way_back_has_the_profile_that_the_config_states(
    invoke: Invoke, a: Path, b: Path, tmp_path: Path
) -> None:
    config, profile = tmp_path / "config.toml", profile_file(tmp_path / "p.toml")
    config.write_text(
        f'[stores.prod]\nurl = "file://{a}"\nprofile = "{profile}"\n'
        f'[stores.copy]\nurl = "file://{b}"\n'
    )
    objects(a)[0][0].unlink()
    compared = ("--config", config, "diff", "prod:", "copy:")
    (closing,) = invoke.document(*compared, exit_code=4)["next"]
    assert closing["commands"] == [
        f"hicachectl --config {config} migrate copy: prod: --profile {profile}"
    ]
    run_all(closing["commands"], exit_codes={0})
    invoke(*compared)


def tp(size: int) -> hicachectl.Profile:
    return replace(PROFILE, tp=size)


def test_a_converted_page_differs_in_what_it_differs(
    invoke: Invoke, a: Path, tmp_path: Path
) -> None:
    b, profile = tmp_path / "b", profile_file(tmp_path / "2.toml")
    options = ("--profile", profile, "--to-tp", 4)
    invoke("migrate", a, b, *options)
    of_a, of_b = objects(a), objects(b)
    of_a[0][0].unlink()
    of_b[1][0].unlink()
    truncate(of_a[2][0])
    truncate(of_b[3][0])
    overwrite(of_b[4][1])
    for path in of_b[5]:
        path.unlink()
    for path in of_a[6]:
        path.unlink()
    document = invoke.document("diff", a, b, *options, "--verify", exit_code=4)
    expected = ["incomplete", "incomplete", "size", "size", "bytes", "only-in-a", "only-in-b"]
    assert kinds_of(document) == {
        page[0].name[:64]: kind for page, kind in zip(of_b, expected, strict=False)
    }
    first, second = (document["differences"][at] for at in range(2))
    assert (first["lacking_a"] > 1, first["lacking_b"]) == (True, 0)
    assert (second["lacking_a"], second["lacking_b"]) == (0, 1)


def test_other_deployments_are_not_compared_with_a_conversion(
    invoke: Invoke, a: Path, tmp_path: Path
) -> None:
    profile = profile_file(tmp_path / "2.toml")
    options = ("--profile", profile, "--to-tp", 1)
    b = tmp_path / "b"
    invoke("migrate", a, b, *options)
    put_pages(a, range(3), "_other-model")
    put_pages(b, range(2), "_other-model")
    said = invoke("-q", "diff", a, b, *options)
    assert "Not compared: 3 pages of other deployments than the profile's in A" in said.stderr
    assert "Not compared: 2 pages of other deployments than the profile's in B" in said.stderr
    assert invoke.document("diff", a, b, *options)["not_compared"] == 5


@pytest.mark.parametrize("side", ["a", "b"])
def test_young_pages_that_differ_are_in_flight(invoke: Invoke, a: Path, b: Path, side: str) -> None:
    changed = objects(a if side == "a" else b)
    changed[0][0].unlink()
    os.utime(changed[0][1])
    said = invoke("diff", a, b)
    assert "Not judged: 1 page that differ" in said.stderr
    assert f"{PAGES - 1} pages equal" in said.stdout
    assert "; 0 different; 1 page not compared" in said.stdout
    document = invoke.document("diff", a, b)
    assert (document["in_flight"], document["complete"], document["different"]) == (1, False, 0)
    assert document["differences"] == []
    invoke("diff", a, b, "--grace", "0s", exit_code=4)
    os.utime(changed[1][0])  # whole and equal
    assert invoke.document("diff", a, b)["in_flight"] == 1


def test_a_comparison_of_nothing_is_no_success(invoke: Invoke, a: Path, tmp_path: Path) -> None:
    empty, young = tmp_path / "empty", demo_store(tmp_path / "young", 2)
    empty.mkdir()
    for pair in ((a, empty), (empty, a)):
        assert f"{empty} has no page; check the mount" in invoke("diff", *pair, exit_code=3).stderr
        invoke("diff", *pair, "--allow-empty", exit_code=4)
    other = shutil.copytree(empty, tmp_path / "other")
    invoke("diff", empty, other, "--allow-empty")
    for path in young.glob("*.bin"):
        os.utime(path)
    said = invoke("-q", "diff", young, empty, "--allow-empty")
    assert "Not judged: 2 pages" in said.stderr
    shutil.copytree(young, other, dirs_exist_ok=True)
    for path in other.glob("*.bin"):
        truncate(path)
    said = invoke("diff", young, other, exit_code=4)
    assert "No page was compared" in said.stderr
    invoke("diff", a, tmp_path / "missing", exit_code=3)
    assert not (tmp_path / "missing").exists()


def test_filters_choose_pages_in_either_store(invoke: Invoke, a: Path, b: Path) -> None:
    kinds = make_differ(a, b)
    whole = invoke.document("diff", a, b, "--state", "partial", exit_code=4)
    assert [*kinds_of(whole).values()] == ["incomplete"] * 2  # partial in one of the stores
    assert whole["equal"] == 0
    for one, kind in list(kinds.items())[:5]:
        document = invoke.document("diff", a, b, "--page", one[:20], exit_code=4)
        assert kinds_of(document) == {one: kind}
    said = invoke("diff", a, b, "--model", "nobody", exit_code=2)
    assert said.stdout == ""
    assert "Nothing to compare: --model nobody: no page matches" in said.stderr
    invoke("diff", a, b, "--model", "nobody", "--allow-empty", "--verify")


def test_rows_name_pages_for_other_commands(
    invoke: Invoke, a: Path, b: Path, tmp_path: Path
) -> None:
    kinds = make_differ(a, b)
    rows = tmp_path / "rows.jsonl"
    invoke("diff", a, b, "--format", "jsonl", "-o", rows, exit_code=4)
    listed = invoke("ls", a, "--pages", rows, "--format", "jsonl").rows
    found = {one for one, kind in kinds.items() if kind not in ("only-in-b", "bytes")}
    assert {row["page"] for row in listed} == found


def test_one_store_is_not_compared_with_itself(invoke: Invoke, a: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(a)
    for other in (a, f"file://{a}", tmp_path / "link"):
        assert "name this store" in invoke("diff", a, other, exit_code=2).stderr


def test_keys_without_pages_are_counted(invoke: Invoke, a: Path, b: Path) -> None:
    (b / "README").write_text("no object")
    said = invoke("-q", "diff", a, b)
    assert "Not compared: 1 object with unknown keys" in said.stderr
    assert invoke.document("diff", a, b)["unknown_keys"] == 1


def test_ambiguous_keys_are_compared_and_no_command_copies_them(
    invoke: Invoke, tmp_path: Path
) -> None:
    """Keys of cp 0 of 2 can be those of a model whose name ends so, unless there is rank 1."""
    a, b = tmp_path / "a", tmp_path / "b"
    put_pages(a, range(5), "_model_cp0_2")
    put_pages(b, range(4), "_model_cp0_2")
    document = invoke.document("diff", a, b, exit_code=4)
    assert (document["equal"], kinds_of(document)) == (4, {page(4): "only-in-a"})
    (row,) = document["differences"]
    assert (row["group"], row["model"], row["tp_size"], row["state_a"]) == (
        "?",
        None,
        None,
        "unknown",
    )
    (closing,) = document["next"]
    assert closing["text"].endswith(
        "1 of them with ambiguous keys, which a profile must decide first"
    )
    assert closing["commands"] == []
    put_pages(b, range(5), "_model_cp0_2", "_model_cp1_2")
    for pair, lacking in ((a, b), "lacking_a"), ((b, a), "lacking_b"):
        document = invoke.document("diff", *pair, exit_code=4)
        assert {*kinds_of(document).values()} == {"incomplete"}
        assert [row[lacking] for row in document["differences"]] == [1] * 5


def test_a_rank_that_one_store_lacks_everywhere(invoke: Invoke, a: Path, b: Path) -> None:
    for path in b.glob("*_1_2.bin"):
        path.unlink()
    for pair in ((a, b), (b, a)):
        document = invoke.document("diff", *pair, exit_code=4)
        assert {*kinds_of(document).values()} == {"incomplete"}
        assert document["different"] == PAGES


def test_deployments_are_counted_apart(invoke: Invoke, a: Path, b: Path) -> None:
    put_pages(a, range(3), "_first")
    put_pages(b, range(2), "_second")
    document = invoke.document("diff", a, b, exit_code=4)
    sums = [(one["group"], one["difference"], one["pages"]) for one in document["sums"]]
    assert sorted(sums) == [
        ("demo-hybrid-1b tp2", "equal", PAGES),
        ("first", "only-in-a", 3),
        ("second", "only-in-b", 2),
    ]
    bytes_of = {one["group"]: (one["nbytes_a"], one["nbytes_b"]) for one in document["sums"]}
    assert (bytes_of["first"], bytes_of["second"]) == ((3 * 64, 0), (0, 2 * 64))


def test_a_pack_with_other_keys_states_the_profile(invoke: Invoke, a: Path, tmp_path: Path) -> None:
    pack, profile = f"pack://{tmp_path}/x.hcpack", profile_file(tmp_path / "p.toml")
    invoke("migrate", a, f"{pack}?keys=mooncake", "--profile", profile)
    assert invoke.document("diff", a, pack, "--verify")["equal"] == PAGES
    assert invoke.document("diff", pack, a, "--verify")["equal"] == PAGES


@pytest.mark.slow
def test_packs_hold_the_same_pages(invoke: Invoke, a: Path, tmp_path: Path) -> None:
    pack, profile = tmp_path / "x.hcpack", profile_file(tmp_path / "p.toml")
    invoke("migrate", a, pack, "--profile", profile)
    before = pack.read_bytes()
    for pair in ((a, pack), (pack, a)):
        assert invoke.document("diff", *pair, "--verify")["equal"] == PAGES
    assert pack.read_bytes() == before
    with pack.open("r+b") as file:
        file.seek(len(before) // 3)
        file.write(bytes(64))
    for pair in ((a, pack), (pack, a)):
        document = invoke.document("diff", *pair, "--verify", exit_code=4)
        assert {*kinds_of(document).values()} == {"unreadable"}


def test_an_object_that_vanishes_is_no_difference(
    invoke: Invoke, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = FileStore.read_into
    gone = objects(b)[0][0]

    def evicted(store: FileStore, *arguments: Any, **options: Any) -> Any:
        gone.unlink(missing_ok=True)
        return read_into(store, *arguments, **options)

    monkeypatch.setattr(FileStore, "read_into", evicted)
    document = invoke.document("diff", a, b, "--verify")
    assert (document["gone"], document["equal"], document["complete"]) == (1, PAGES - 1, False)


@pytest.mark.slow
def test_trailers_tell_weights_apart(invoke: Invoke, tmp_path: Path) -> None:
    a, b, same = tmp_path / "a", tmp_path / "b", tmp_path / "same"
    for store, weights in ((a, HYBRID.weights), (b, OTHER_WEIGHTS), (same, HYBRID.weights)):
        served_store(store, replace(HYBRID, weights=weights))
    profile = tmp_path / "p.toml"
    profile.write_text(dump_profile(replace(HYBRID, weights="")))
    assert invoke.document("diff", a, same, "--profile", profile, "--verify")["equal"] == 4
    for options in ((), ("--profile", profile)):
        document = invoke.document("diff", a, b, *options, exit_code=4)
        assert [*kinds_of(document).values()] == ["identity"] * 4
    swap_ranks(same, page(0))
    document = invoke.document("diff", a, same, "--profile", profile, "--verify", exit_code=4)
    assert document["different"] == 1


def test_a_profile_that_contradicts_a_store_shows_what_differs(
    invoke: Invoke, a: Path, b: Path, tmp_path: Path
) -> None:
    for path in b.glob("*.bin"):
        truncate(path)
    said = invoke("diff", a, b, "--profile", profile_file(tmp_path / "p.toml"), exit_code=4)
    assert f"The profile contradicts the store file://{b}: expected" in said.stderr
    assert f"0 pages equal (names and sizes, bytes not read); {PAGES} different" in said.stdout


def test_a_suggested_command_has_only_options_of_migrate() -> None:
    diff, migrate = (
        {max(option.opts, key=len): option for option in options_of(cli.get_command(None, name))}  # type: ignore[arg-type]
        for name in ("diff", "migrate")
    )
    repeated = {name for name, option in diff.items() if option.repeats}
    assert repeated <= migrate.keys()
    others = {name for name, option in diff.items() if option.repeats is None}
    assert others == {name for name in diff if name.startswith("--to-")} | {"--trailers"}


def test_programs_compare_stores(a: Path, b: Path) -> None:
    make_differ(a, b)
    reads = hicachectl.CopyOptions(verify=True)
    with hicachectl.open_store(str(a)) as first, hicachectl.open_store(str(b)) as second:
        result = hicachectl.diff(first, second, hicachectl.DiffRequest(options=reads))
    assert result.failed
    assert result.document["next"][0]["commands"] == ["hicachectl migrate A B"]
    assert result.rows.num_rows == 6
