"""The data settings and the table of sources."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from data.sources import MODES, SOURCES, DataConfig, load_documents

GROUP = Path(__file__).parents[2] / "configs" / "data"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "shakespear"}, "data.source=shakespear .*did you mean shakespeare"),
        ({"source": "enwik8"}, "data.source=enwik8 is not one of shakespeare, .*files$"),
        ({"mode": "bos_alligned"}, "data.mode=bos_alligned .*did you mean bos_aligned"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0 must lie between 0 and 1"),
        ({"val_fraction": 1.0}, "data.val_fraction=1.0"),
        ({"val_fraction": float("nan")}, "data.val_fraction=nan"),
        ({"source": "files"}, "data.source=files needs data.path"),
        ({"path": ""}, "data.path is empty"),
        ({"cache_dir": ""}, "data.cache_dir is empty"),
        ({"val_path": "val.txt"}, "data.val_path needs data.path"),
        ({"text_field": "content"}, "data.text_field=content needs data.path"),
        ({"path": "a.txt", "val_path": "b.txt", "val_fraction": 0.2}, "exclude each other"),
        ({"val_fraction": 0.2}, "does not apply to data.source=shakespeare"),
        ({"source": "back_copy", "val_fraction": 0.2}, "whose validation split is a random stream"),
    ],
)
def test_wrong_settings_fail_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        DataConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", SOURCES)
def test_a_path_always_means_that_file(source, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("a text of my own\n" * 20, "utf-8")
    config = DataConfig(source=source, path=str(file), cache_dir=str(tmp_path / "cache"))
    assert config.used_source == "files"
    splits = load_documents(config, log=print)
    text = "".join(document.text for split in (splits.train, splits.val) for document in split)
    assert text == file.read_text("utf-8")


def test_a_fraction_applies_to_a_path_on_top_of_the_default_source():
    assert DataConfig(path="a.txt", val_fraction=0.2).used_source == "files"


@pytest.mark.parametrize("mode", MODES)
def test_settings_survive_omegaconf(mode):
    schema = OmegaConf.structured(DataConfig)
    merged = OmegaConf.merge(schema, {"mode": mode, "path": "a.txt"})
    assert OmegaConf.to_object(merged) == DataConfig(mode=mode, path="a.txt")


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(OmegaConf.structured(DataConfig), {"val_franction": 0.1})


def test_every_source_has_a_file_of_values_that_fits():
    files = {file.stem: OmegaConf.load(file) for file in GROUP.glob("*.yaml")}
    assert set(SOURCES) <= set(files)
    for name, values in files.items():
        path = {"path": "a.txt"} if values.source == "files" else {}
        merged = OmegaConf.merge(OmegaConf.structured(DataConfig), values, path)
        config = OmegaConf.to_object(merged)
        assert isinstance(config, DataConfig)
        assert config.used_source == name
