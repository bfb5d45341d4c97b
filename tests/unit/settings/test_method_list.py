"""The registry of methods: one line and one file each, and everything that names them derives."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from engines import FakeContext
from table_model import FakeTable

from specllama.models import catalog
from specllama.models.companions import HEADS
from specllama.settings import method_list as registry
from specllama.settings.params import PROPOSERS
from specllama.speculative import drafting
from specllama.speculative.drafting.draft_tree import OTHER_WORDS
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.method import (
    CHAINS_ONLY,
    NO_DRAFT,
    NO_HEAD,
    Facts,
    Kit,
    booked,
    find,
    menu,
)
from specllama.speculative.drafting.method import methods as entries
from specllama.speculative.policy.costs import Costs


class Named(Drafter):
    def __init__(self, name: str) -> None:
        self.name = self.paid = name


def test_every_line_has_its_file_and_every_file_its_line() -> None:
    assert tuple(method.name for method in entries()) == registry.names()
    folder = Path(drafting.__path__[0])
    holding = {p.stem for p in folder.glob("*.py") if "\nMETHOD = " in p.read_text("utf-8")}
    assert holding == set(registry.FILES.values())
    assert find("auto") is find("none") is None


def test_what_entries_say_is_complete_and_tells_them_apart() -> None:
    for method in entries():
        assert method.label
        assert method.short
        assert method.blurb.endswith(".")
        assert len(method.letter) == (method.name not in ("mixed", "merged")), "they only join"
    letters = [method.letter for method in entries() if method.letter]
    assert len(set(letters)) == len(letters)


def test_choices_derive_from_the_registry() -> None:
    assert ("auto", *registry.names(), "none") == PROPOSERS
    assert {head.method for head in HEADS.values()} < {m.name for m in entries() if m.cost == "own"}
    assert {pair.method for pair in catalog.load().values()} < set(registry.names())


def test_names_cost_no_import() -> None:
    program = (
        "import sys; from specllama.settings.params import GenerateParams\n"
        "GenerateParams(proposer='self')\n"
        "print([m for m in ('numpy', 'specllama.speculative.drafting.method') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_costs_are_booked_where_the_entry_says() -> None:
    costs = Costs()
    for method in entries():
        drafter = Named(method.name)
        drafter.paid = "draft"
        booking = booked(drafter)
        assert booking.method == method.name
        assert booking.at_once == method.at_once
        assert (booking.paid == "") == (method.cost == "free")
        own = costs.steps(booking) is not costs.draft
        assert own == (method.cost == "own"), method.name
    kept = msgspec.convert(msgspec.to_builtins(costs, str_keys=True), Costs, str_keys=True)
    assert set(kept.own) == {m.name for m in entries() if m.cost == "own"}


@pytest.mark.parametrize(
    ("parts", "paid"),
    [
        (("medusa", "eagle3", "mtp", "self", "draft"), "draft"),
        (("medusa", "eagle3", "mtp", "self"), "mtp"),
        (("medusa", "eagle3", "dflash", "self"), "eagle3"),
        (("medusa", "dflash", "self"), "dflash"),
        (("medusa",), "medusa"),
        (("self",), ""),
    ],
)
def test_auto_drafts_with_copies_and_the_best_paying_source(
    parts: tuple[str, ...], paid: str
) -> None:
    target = FakeContext(FakeTable())
    made = {name: Named(name) for name in parts}
    mixed = Kit(target, made=dict(made)).drafter("mixed")
    assert [source.name for source in mixed.sources] == [
        "forced",
        "suffix",
        "ngram",
        "prediction",
        *([paid] if paid else []),
    ]
    assert mixed.paid == paid


def test_drafters_are_made_of_what_the_pair_has() -> None:
    target, draft = FakeContext(FakeTable()), FakeContext(FakeTable())
    assert target.max_leaves > 1
    plain = ["forced", "suffix", "ngram", "prediction", "mixed", "lookahead"]
    assert list(Kit(target).all()) == plain
    assert list(Kit(target, draft).all()) == ["draft", *plain[:5], "tree", "merged", plain[5]]
    lacking = Kit(target, reasons={"mtp": "no NextN"})
    assert lacking.drafter("mtp") is lacking.drafter("unheard of") is None
    assert lacking.facts.own == {"mtp": "no NextN"}
    translating = Kit(target, Named("draft"))
    assert [n for n in translating.all() if n not in plain] == ["draft"], "no laws, no trees"
    for name, drafter in Kit(target, draft).all().items():
        assert drafter.name == name


def reasons(facts: Facts) -> dict[str, str]:
    ways = menu(facts)
    assert all(way.available is not bool(way.reason) for way in ways)
    return {way.name: way.reason for way in ways if way.reason}


def test_why_a_method_is_not_there() -> None:
    own = {"eagle3": "", "dflash": "", "medusa": "another target", "mtp": "", "self": ""}
    assert reasons(Facts(draft=True, own=own)) == {"medusa": "another target"}
    bare = reasons(Facts())
    assert bare["draft"] == bare["tree"] == bare["merged"] == NO_DRAFT
    assert bare["eagle3"] == bare["dflash"] == bare["medusa"] == NO_HEAD
    assert "NextN" in bare["mtp"]
    assert "layers" in bare["self"]
    chains = reasons(Facts(draft=True, trees=False, own=own))
    assert chains.pop("medusa")
    assert chains == dict.fromkeys(("tree", "merged", "lookahead"), CHAINS_ONLY)
    words = reasons(Facts(draft=True, laws=False, own=own))
    assert words["tree"] == words["merged"] == OTHER_WORDS
    assert "draft" not in words
