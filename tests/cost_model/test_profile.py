import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cost_model
from cost_model.errors import ProfileError
from cost_model.measurements import CollectiveSamples, MatmulRates, UpdateRates
from cost_model.profile import Profile


@pytest.fixture
def measured(round_profile: Profile) -> Profile:
    samples = CollectiveSamples("all_gather", ((2, 8), (4, 1)), (1000, 2000), (1e-4, 1.5e-4))
    return replace(round_profile, collectives=(samples,))


def test_shipped_profiles_load_and_are_nominal() -> None:
    assert Profile.names() == ("a100", "cpu", "h100")
    for name in Profile.names():
        profile = Profile.named(name)
        assert profile == Profile.load(name)
        assert profile.name == name and profile.nominal and profile.sources
        assert f"{name} (nominal, " in str(profile)
    assert Profile.named("h100").device_type == Profile.named("a100").device_type == "cuda"
    assert Profile.named("cpu").device_type == "cpu"


def test_save_and_load_give_the_same_profile(measured: Profile, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    measured.save(path)
    assert Profile.load(path) == Profile.load(str(path)) == measured
    assert json.loads(path.read_text())["schema_version"] == 2


def test_rates_of_other_kernels_survive_the_file(measured: Profile, tmp_path: Path) -> None:
    rates = (MatmulRates("float32", (1e6, 1e8), (1e11, 2e11), (0.1, 0.0)),)
    device = replace(
        measured.device,
        convolution=rates,
        attention=rates,
        pooling=rates,
        narrow_convolution=rates,
        update=UpdateRates(1e-3, 1e9),
    )
    profile = replace(measured, device=device)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert profile.hash() != measured.hash()
    with pytest.raises(ProfileError, match=r"device.attention\[1\].dtype repeats float32"):
        replace(measured, device=replace(device, attention=rates * 2))
    with pytest.raises(ProfileError, match=r"device.update.bytes_per_second"):
        replace(measured, device=replace(device, update=UpdateRates(1e-3, 0.0)))


def test_lists_of_numbers_are_written_on_one_line(measured: Profile) -> None:
    assert '"nbytes": [1000, 2000]' in measured.to_json()


def test_hash_is_of_what_prices_depend_on(measured: Profile) -> None:
    renamed = replace(measured, name="other", date="2030-01-01", command="", hardware="x", sources=("y",))
    assert renamed.hash() == measured.hash()
    assert replace(measured, nominal=True).hash() != measured.hash()
    assert replace(measured, collectives=()).hash() != measured.hash()
    assert replace(measured, collective_launch_seconds=5.1e-6).hash() != measured.hash()
    assert replace(measured, links=measured.links[1:]).hash() != measured.hash()
    assert replace(measured, overlap_efficiency=0.6).hash() != measured.hash()
    steady = replace(measured.collectives[0], spread=(0.1, 0.1))
    assert replace(measured, collectives=(steady,)).hash() == measured.hash()


def test_hash_is_the_same_after_a_file_and_in_every_process(measured: Profile) -> None:
    assert Profile.from_json(measured.to_json(), "text").hash() == measured.hash()
    code = "from cost_model.profile import Profile; print(Profile.named('h100').hash())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert other.stdout.strip() == Profile.named("h100").hash()


ROOT = Path(cost_model.__file__).parent.parent


def test_cost_model_needs_no_torch() -> None:
    modules = [f"cost_model.{path.stem}" for path in Path(cost_model.__file__).parent.glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert len(modules) > 8
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_such_profile(tmp_path: Path) -> None:
    for ask in (Profile.named, Profile.load):
        with pytest.raises(ProfileError, match=r"no shipped profile is named 'h200'\n.*a100, cpu, h100"):
            ask("h200")
    with pytest.raises(ProfileError, match=r"cannot read profile .*gone\.json"):
        Profile.load(tmp_path / "gone.json")


def test_a_file_without_suffix_is_still_a_file(
    measured: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    measured.save("mine")
    assert Profile.load("mine") == measured


# ---- what is refused, when read: how the JSON is broken, and the message

Break = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.pop("schema_version"), "field schema_version is None; this autoshard reads 2"),
        (lambda d: d.update(schema_version=1), "field schema_version is 1; this autoshard reads 2"),
        (lambda d: d.pop("links"), "field links is missing"),
        (lambda d: d.pop("overlap_efficiency"), "field overlap_efficiency is missing"),
        (lambda d: d.update(overlap_efficiency="all"), "field overlap_efficiency is 'all', not a number"),
        (lambda d: d["collectives"][0].update(spread=0.1), "field collectives[0].spread is 0.1, not a list"),
        (lambda d: d["links"][1].pop("latency_seconds"), "field links[1].latency_seconds is missing"),
        (lambda d: d.update(nominl=True), "field nominl is not a field of a profile"),
        (lambda d: d.update(nominal="yes"), "field nominal is 'yes', not true or false"),
        (lambda d: d.update(name=3), "field name is 3, not a text"),
        (lambda d: d.update(software={"torch": 2}), "field software[...] is of another type, not a text"),
        (lambda d: d.update(software=[]), "field software is [], not an object"),
        (lambda d: d["device"].update(fast=1), "field device.fast is not a field of a profile"),
        (
            lambda d: d["collectives"][0].update(group=[[2]]),
            "field collectives[0].group[0] is [2]; it must be a list of length 2",
        ),
        (
            lambda d: d["collectives"][0].update(kind="gossip"),
            "field collectives[0].kind is 'gossip'; it must be one of all_gather,",
        ),
        (lambda d: d.update(links={}), "field links is {}, not a list"),
        (lambda d: d.update(device=[]), "field device is [], not an object"),
        (lambda d: d.update(sources=[1]), "field sources[0] is 1, not a text"),
        (lambda d: d["links"][0].update(ranks=4.5), "field links[0].ranks is 4.5, not an integer"),
        (
            lambda d: d["device"].update(launch_seconds="2us"),
            "field device.launch_seconds is '2us', not a number",
        ),
        (
            lambda d: d["collectives"][0].update(group=[[2, 4], 4]),
            "field collectives[0].group[1] is 4, not a list",
        ),
        (
            lambda d: d["collectives"][0]["seconds"].__setitem__(1, None),
            "field collectives[0].seconds[1] is None, not a number",
        ),
        (
            lambda d: d["collectives"][0]["seconds"].__setitem__(0, float("nan")),
            "field collectives[0].seconds[0] is nan; it must be a number, above 1e-30",
        ),
    ],
)
def test_a_broken_file_names_file_field_and_remedy(
    measured: Profile, tmp_path: Path, spoil: Break, message: str
) -> None:
    data = json.loads(measured.to_json())
    spoil(data)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and message in text and "\n  try: " in text


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_not_a_profile_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json: (not JSON|field schema_version is None)"):
        Profile.load(path)


# ---- what is refused, however the profile is made


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_numbers_must_be_finite_and_positive(measured: Profile, bad: float) -> None:
    bound = "below 1e+30" if bad > 0 else "above 1e-30"

    def refused(field: str, **changes: Any) -> None:
        with pytest.raises(ProfileError) as caught:
            replace(measured, **changes)
        assert f"profile 'round': field {field} is {bad!r}; it must be a number, {bound}" in str(caught.value)

    refused("collective_launch_seconds", collective_launch_seconds=bad)
    for name in ("latency_seconds", "bytes_per_second", "peak_bytes_per_second"):
        links = (replace(measured.links[0], **{name: bad}), measured.links[1])
        refused(f"links[0].{name}", links=links)
    for name in ("launch_seconds", "memory_bytes_per_second"):
        refused(f"device.{name}", device=replace(measured.device, **{name: bad}))
    matmul = (MatmulRates("float32", (1e6, 1e7), (1e12, bad)),)
    refused("device.matmul[0].flops_per_second[1]", device=replace(measured.device, matmul=matmul))
    samples = replace(measured.collectives[0], seconds=(1e-4, bad))
    refused("collectives[0].seconds[1]", collectives=(samples,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "gossip"}, "collectives[0].kind is 'gossip'; it must be one of all_gather,"),
        ({"seconds": (2e-4, 1e-4)}, "collectives[0].seconds[1] is 0.0001, less than 0.0002 for fewer bytes"),
        ({"nbytes": (2000, 2000)}, "collectives[0].nbytes[1] is 2000, not above 2000 before it"),
        ({"nbytes": (1000,)}, "collectives[0].nbytes is (1000,); it must be a list of length at least 2"),
        ({"seconds": (1e-4,)}, "collectives[0] has 2 sizes and 1 times; it needs a time for each size"),
        ({"group": ()}, "collectives[0].group is (); it must be a list of length at least 1"),
        ({"group": ((1, 1),)}, "collectives[0].group[0][0] is 1; it must be an integer, at least 2"),
        ({"group": ((4, 0),)}, "collectives[0].group[0][1] is 0; it must be an integer, at least 1"),
        (
            {"group": ((4, 2**21),)},
            "collectives[0].group[0][1] is 2097152; it must be an integer, at most 1048576",
        ),
        ({"group": ((2**11, 2**10), (2**10, 1))}, "collectives[0].group spans more than 1048576 ranks"),
        ({"group": ((4, 1), (2, 4))}, "collectives[0].group is ((4, 1), (2, 4)); list large strides first"),
        ({"group": ((2, 4), (4, 1))}, "collectives[0].group is ((2, 4), (4, 1)); list large strides first"),
        ({"group": ((2, 8), (4, 1))}, None),
        ({"spread": (0.0, 1.5)}, None),
        ({"spread": (0.1,)}, "collectives[0].spread has 1 values for 2 sizes; give one each, or none"),
        ({"spread": (0.1, -0.1)}, "collectives[0].spread[1] is -0.1; it must be a number, at least 0.0"),
        # 7/8 of 1 GB through 4 ports of 20 GB/s at peak would need (8 - 4) / 8 / 4 / 20e9 * 1e9 = 6.25 ms.
        ({"nbytes": (1000, 10**9), "seconds": (1e-4, 6.26e-3)}, None),
        (
            {"nbytes": (1000, 10**9), "seconds": (1e-4, 6.24e-3)},
            "collectives[0].seconds[1] is 0.00624 for 1000000000 bytes; at the peak rate of the links, "
            "all_gather over 8 ranks takes at least 0.00625",
        ),
    ],
)
def test_measured_collectives(measured: Profile, changes: dict[str, Any], message: str | None) -> None:
    samples = replace(CollectiveSamples("all_gather", ((8, 1),), (1000, 2000), (1e-4, 1.5e-4)), **changes)
    if message is None:
        assert replace(measured, collectives=(samples,)).collectives == (samples,)
        return
    with pytest.raises(ProfileError) as caught:
        replace(measured, collectives=(samples,))
    assert message in str(caught.value)


def test_a_number_that_no_float_holds(measured: Profile) -> None:
    with pytest.raises(
        ProfileError, match=r"field collective_launch_seconds is an int: Number out of range\n  try: "
    ):
        replace(measured, collective_launch_seconds=10**400)


def test_a_broadcast_measured_by_an_older_version_stays(measured: Profile) -> None:
    samples = CollectiveSamples("broadcast", ((8, 1),), (1000, 2000), (1e-4, 1.5e-4))
    text = replace(measured, collectives=(*measured.collectives, samples)).to_json()
    assert Profile.from_json(text, "text").collectives == (*measured.collectives, samples)


def test_one_group_twice(measured: Profile) -> None:
    with pytest.raises(ProfileError, match=r"collectives\[1\] repeats a kind and group"):
        replace(measured, collectives=measured.collectives * 2)


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.1])
def test_overlap_efficiency_is_a_share(measured: Profile, bad: float) -> None:
    with pytest.raises(
        ProfileError, match=r"field overlap_efficiency is .*; it must be a number, at (least 0|most 1).0"
    ):
        replace(measured, overlap_efficiency=bad)


def test_spread_may_be_left_out_of_the_file(measured: Profile) -> None:
    data = json.loads(measured.to_json())
    assert data["collectives"][0].pop("spread") == [] and data["device"]["matmul"][0].pop("spread") == []
    assert Profile.from_json(json.dumps(data), "text") == measured


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((None, None), "links[0].ranks is null; only the outermost"),
        ((4, 6), "links[1].ranks is 6; it must be a multiple of 4 above it"),
        ((4, 4), "links[1].ranks is 4; it must be a multiple of 4 above it"),
        ((1, None), "links[0].ranks is 1; it must be a multiple of 1 above it"),
    ],
)
def test_link_levels_nest(measured: Profile, ranks: tuple[int | None, int | None], message: str) -> None:
    links = tuple(replace(link, ranks=n) for link, n in zip(measured.links, ranks, strict=True))
    with pytest.raises(ProfileError) as caught:
        replace(measured, links=links, collectives=())
    assert message in str(caught.value)


def test_links_must_be_stated_and_under_their_peak(measured: Profile) -> None:
    with pytest.raises(ProfileError, match=r"field links is \(\); it must be a list of length at least 1"):
        replace(measured, links=())
    fast = replace(measured.links[0], bytes_per_second=300e9)
    with pytest.raises(
        ProfileError, match=r"links\[0\].bytes_per_second is 3e\+11, above the peak of 2e\+11"
    ):
        replace(measured, links=(fast, measured.links[1]))


def test_matmul_tables(measured: Profile) -> None:
    def refused(message: str, *matmul: MatmulRates) -> None:
        with pytest.raises(ProfileError, match=message):
            replace(measured, device=replace(measured.device, matmul=matmul))

    good = MatmulRates("float32", (1e6, 1e8), (1e12, 1e12))
    refused(r"device.matmul is \(\); it must be a list of length at least 1")
    refused(r"device.matmul\[1\].dtype repeats float32", good, good)
    refused("a rate for each", replace(good, flops=(1e6,)))
    refused(r"device.matmul\[0\].flops is \(\); it must be", replace(good, flops=(), flops_per_second=()))
    refused(r"device.matmul\[0\].spread has 1 values for 2 sizes", replace(good, spread=(0.1,)))
    refused("makes a larger product faster", replace(good, flops_per_second=(1e10, 1e13)))
    # Equal times, as rates and back: 3e-6 and 2.9999999999999997e-06. Rounding is not refused.
    even = MatmulRates("float32", (3e5, 11e5), (3e5 / 3e-6, 11e5 / 3e-6))
    replace(measured, device=replace(measured.device, matmul=(even,)))
