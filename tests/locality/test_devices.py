"""Device profiles: profiles of the package load, measured profiles are read back, wrong values are refused by name."""

import pytest
import yaml

from stickymoe.errors import StickyError
from stickymoe.locality.devices import as_yaml, device_names, load_device, measure_device, parse_bytes, parse_device

GOOD = {"fast_memory": "8GB", "load_bandwidth": "500MB", "load_latency_ms": 0.1, "compute_bandwidth": "17GB"}


@pytest.mark.parametrize("name", device_names())
def test_profiles_of_the_package_have_every_number_and_its_source(name):
    device = load_device(name)
    sources = " ".join(device.sources)
    for figure in GOOD:
        assert getattr(device, figure) > (-1 if figure == "load_latency_ms" else 0)
        assert figure in sources, figure
    assert parse_device(as_yaml(device), name) == device


def test_a_load_takes_its_latency_and_its_transfer():
    device = parse_device(yaml.safe_dump(GOOD), "d")
    assert device.load_ms(5e6) == pytest.approx(0.1 + 10)
    assert device.compute_ms(17e6) == pytest.approx(1)


def test_overlap_hides_loads_behind_a_part_of_the_compute():
    serial, overlapping = (parse_device(yaml.safe_dump({**GOOD, **more}), "d") for more in ({}, {"overlap": 0.25}))
    assert serial.token_ms(8.0, 5.0) == 13
    assert overlapping.token_ms(8.0, 5.0) == 11
    assert overlapping.token_ms(8.0, 1.5) == 8  # all loads are hidden
    assert parse_device(as_yaml(overlapping), "d") == overlapping


@pytest.mark.parametrize("value", [-0.1, 1.1, "much", None, True, [1], float("nan")])
def test_a_wrong_overlap_is_refused(value):
    with pytest.raises(StickyError, match=r"^device d: overlap: got .*, expected a number from 0 to 1\.$"):
        parse_device(yaml.safe_dump({**GOOD, "overlap": value}), "d")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512MB", 512e6),
        ("1.5 GiB", 1.5 * 2**30),
        ("4096", 4096),
        ("4kB", 4000),
        ("64KB", 64e3),
        ("1kiB", 1024),
        ("2G", 2e9),
    ],
)
def test_bytes_with_units(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "lots", "5XB", "-3MB", "1..5GB", "nan", "MB"])
def test_text_that_is_not_bytes(text):
    with pytest.raises(StickyError, match=r"^--memory: got '.*', expected bytes such as 512MB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize("figure", GOOD)
@pytest.mark.parametrize("value", [-1, "-5", "much", None, True, [1], float("nan"), float("inf")])
def test_a_wrong_number_is_refused_by_name(figure, value):
    with pytest.raises(StickyError, match=rf"^device d: {figure}: got .*, expected [^\n]*\.$"):
        parse_device(yaml.safe_dump({**GOOD, figure: value}), "d")


@pytest.mark.parametrize("figure", GOOD)
def test_a_missing_number_is_refused_by_name(figure):
    fields = {key: value for key, value in GOOD.items() if key != figure}
    with pytest.raises(StickyError, match=rf"^device d: {figure} is missing"):
        parse_device(yaml.safe_dump(fields), "d")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", r"^device d: got \[1, 2\], expected name, fast_memory"),
        ("", r"^device d: got None"),
        ("a: b: c", r"^device d is not YAML"),
        (yaml.safe_dump({**GOOD, "bandwith": 1}), r"^device d: Unknown setting 'bandwith'"),
        (yaml.safe_dump({**GOOD, "sources": "me"}), r"^device d: sources: got 'me'"),
        (yaml.safe_dump({**GOOD, "sources": 5}), r"^device d: sources: got 5"),
        ("name: 2026-13-45", r"^device d is not YAML: month must be in 1..12"),
    ],
)
def test_yaml_that_is_not_a_profile_is_refused(text, says):
    with pytest.raises(StickyError, match=says + r"[^\n]*$"):
        parse_device(text, "d")


def test_an_unknown_device_gets_near_names(tmp_path):
    with pytest.raises(StickyError, match=r"^Unknown device 'rasberry-pi-5'\. Did you mean 'raspberry-pi-5'\?"):
        load_device("rasberry-pi-5")
    with pytest.raises(StickyError, match=r"nowhere\.yaml cannot be read \(No such file"):
        load_device(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StickyError, match=r"bytes\.yaml is damaged: it is not UTF-8 text"):
        load_device(str(tmp_path / "bytes.yaml"))


def test_this_machine_is_measured(tmp_path):
    device = measure_device(tmp_path, megabytes=1)
    assert min(getattr(device, figure) for figure in GOOD) > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "me.yaml").write_text(as_yaml(device))
    assert load_device(str(tmp_path / "me.yaml")) == device
    with pytest.raises(StickyError, match=r"cannot be written \(No such file"):
        measure_device(tmp_path / "nowhere", megabytes=1)
    with pytest.raises(StickyError, match=r"^megabytes: got 0"):
        measure_device(tmp_path, megabytes=0)
