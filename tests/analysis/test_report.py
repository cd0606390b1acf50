"""The report's content: the right numbers from any run folder, escaped, in one file."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from analysis.head_files import FOLDER, HeadRecord, Measure, write_record
from analysis.report import main, render, write_report
from analysis.report_charts import (
    NAMED_HEADS,
    draw_detectors,
    draw_max_logit,
    draw_sink_formation,
    draw_sink_values,
)
from analysis.report_maps import (
    NOTHING,
    SLIDER_POSITIONS,
    draw_head_maps,
    draw_patterns,
)
from analysis.report_style import MOST_POINTS, text
from analysis.run_facts import describe, parameters
from analysis.run_record import interesting_heads, read_run, shortened, thin, visible
from tests.analysis.synthetic_run import Synthetic, sink, write_run

HEADINGS = [
    "Loss and learning rate",
    "Every head over training",
    "Attention sinks as they form",
    "Largest attention logit",
    "Weight given to nothing",
    "What heads have learned to do",
    "Values and activations at the sink",
    "Events",
    "Attention patterns",
    "Configuration",
]
FOLDER_NAME = "2026-01-31_12-00-00-synthetic"


class Reader(HTMLParser):
    """Collects a page's headings, what it would load, and its text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.scripts += tag == "script"
        if tag == "h2":
            self.headings.append("")
        self.loads += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self.headings[-1] += data
        if self._inside not in ("script", "style"):
            self.text += data


def page_of(run: Path) -> Reader:
    """The report of a run, without the plotting library's four megabytes."""
    return Reader(render(read_run(run), library=""))


def run_of(folder: Path, **made: object) -> Path:
    return write_run(folder / FOLDER_NAME, replace(Synthetic(), **made))  # type: ignore[arg-type]


def test_the_page_tells_the_run_in_order_and_loads_nothing(tmp_path):
    run = run_of(tmp_path, null_mass=True)
    page = page_of(run)
    assert page.headings == HEADINGS
    assert page.loads == ["data:,"]
    path = write_report(run)
    assert path == run / "report.html"
    assert "plotly.js v" in path.read_text(encoding="utf-8")
    assert sorted(p.name for p in run.iterdir() if p.name.startswith(".")) == []


def test_the_facts_are_those_of_the_folder(tmp_path):
    run = read_run(run_of(tmp_path))
    facts = describe(run)
    assert facts["status"] == "done"
    assert facts["steps"] == "1,000 of 1,000"
    assert facts["tokens"] == "4,096,000"
    assert facts["started"] == "2026-01-31 12:00"
    assert facts["computed on"] == "cpu, float32, 1 rank(s); attention sdpa"
    best = min((r for r in run.rows if "val/loss" in r), key=lambda r: r["val/loss"])
    assert facts["best validation loss"] == f"{best['val/loss']:.4f} at step {best['step']:,}"
    assert facts["perplexity there"] == f"{best['val/perplexity']:.2f}"
    # 4,096,000 tokens at about 22,000 tokens/s
    minutes, seconds = map(int, re.findall(r"\d+", facts["training time"]))
    assert 60 * minutes + seconds == pytest.approx(4_096_000 / 22_000, rel=0.02)


def test_parameters_follow_from_the_configuration_and_are_left_out_without_one(tmp_path):
    run = read_run(run_of(tmp_path))
    assert parameters(run) == 65 * 128 + 4 * (3 * 128 * 128 + 3 * 128 * 384) + 9 * 128
    assert parameters(replace(run, config={})) is None
    assert parameters(replace(run, config={"model": {"n_layer": 2, "new": 1}})) is None


@pytest.mark.parametrize("missing", ["train", "probe", "patterns", "attention", "everything"])
def test_a_run_that_measured_less_gets_a_page_that_says_so(tmp_path, missing):
    run = run_of(tmp_path, status="running")
    patterns = {"train": "train-*", "probe": "probe-*", "patterns": "patterns*", "attention": "*"}
    for path in (run / FOLDER).glob(patterns.get(missing, "*")):
        path.unlink()
    if missing == "everything":
        for name in ("metrics.jsonl", "events.jsonl", "log.txt", "status"):
            (run / name).unlink()
    said = {
        "train": "telemetry.every",
        "probe": "train.eval_every",
        "patterns": "train.eval_every",
        "attention": "telemetry.every",
        "everything": "telemetry=default",
    }
    assert said[missing] in page_of(run).text


def test_a_run_without_telemetry_is_told_which_setting_brings_it(tmp_path):
    run = run_of(tmp_path, train_records=0, probe_records=0)
    assert "telemetry=default brings them" in page_of(run).text
    with open(run / "config.yaml", "a", encoding="utf-8") as file:
        file.write("telemetry:\n  enabled: false\n")
    page = page_of(run)
    assert page.headings == [HEADINGS[0], "Heads", "Events", "Configuration"]
    assert "telemetry=none" in page.text


def test_a_single_measurement_is_enough_for_every_chart(tmp_path):
    run = run_of(tmp_path, steps=1, train_records=1, probe_records=1)
    assert page_of(run).headings == HEADINGS


def test_text_of_a_run_stays_text(tmp_path):
    hostile = "<script>alert('x')</script><img src=x onerror=\"y\">"
    run = run_of(tmp_path, notes=hostile, tokens=[hostile, "</script>", "b"])
    plain = page_of(run_of(tmp_path / "plain"))
    line = '{"step": 1, "seen": 2, "kind": "a<b", "layer": 0, "head": null, "value": 1.0, '
    line += '"limit": 2.0, "text": "<script>1</script>"}\n'
    (run / "events.jsonl").write_text(line, encoding="utf-8")
    (run / "log.txt").write_text("device <script>2</script>\n", encoding="utf-8")
    page = page_of(run)
    assert page.scripts == plain.scripts
    assert page.loads == ["data:,"]
    assert "<script>1</script>" in page.text
    assert "<script>2</script>" in page.text
    assert "onerror" in page.text


def test_labels_escape_what_charts_interpret():
    assert text("<b>&amp;</b>") == "&lt;b&gt;&amp;amp;&lt;/b&gt;"


def test_tokens_are_labels_one_can_see():
    assert visible(" a\n\t") == "␣a↵⇥"
    assert visible("") == "(empty)"
    assert visible("\x00") == "\\x00"
    assert shortened("<" * 20) == "<" * 13 + "…"


def test_the_maps_show_the_newest_measurement_up_to_the_slider(tmp_path):
    made = Synthetic()
    figure = draw_head_maps(read_run(run_of(tmp_path)))
    steps = figure.layout.sliders[0].steps
    assert [step.label for step in steps][:3] == ["0", "1", "2"]
    for step in steps:
        number = int(step.label.replace(",", ""))
        values, titles, traces = step.args
        assert list(traces) == [0, 1, 2]
        (words,) = re.findall(r"probe, step ([\d,]+)", titles["annotations[2].text"])
        probed = int(words.replace(",", ""))
        assert probed <= number
        np.testing.assert_allclose(values["z"][2], sink(made, probed), atol=5.1e-4)
        assert values["customdata"][2][0][0] == 0.074
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    np.testing.assert_allclose(figure.data[1].z, sink(made, 1000) * 0.9, atol=5.1e-4)


def test_a_long_run_is_thinned_and_says_so(tmp_path):
    run = run_of(tmp_path, steps=4000, max_steps=4000, train_records=300, probe_records=3)
    steps = draw_head_maps(read_run(run)).layout.sliders[0].steps
    assert SLIDER_POSITIONS / 2 < len(steps) <= SLIDER_POSITIONS
    assert (steps[0].label, steps[-1].label) == ("0", "4,000")
    assert re.search(rf"stops at {len(steps)} of the \d+ measured steps", page_of(run).text)


def test_thinning_keeps_both_ends_and_looks_closely_at_the_beginning():
    steps = np.arange(0, 100_001, 10)
    kept = steps[thin(steps, 100)]
    assert (kept[0], kept[-1]) == (0, 100_000)
    assert len(kept) <= 100
    assert (kept < 1000).sum() > 15
    assert thin(np.arange(5), 100).tolist() == [0, 1, 2, 3, 4]


def test_formation_curves_name_the_strongest_and_mark_events(tmp_path):
    made = Synthetic()
    run = read_run(run_of(tmp_path))
    figure = draw_sink_formation(run)
    named = [t for t in figure.data if t.name.startswith("layer")]
    assert len(named) == NAMED_HEADS
    row, head = np.unravel_index(made.strength.argmax(), made.strength.shape)
    first = min(named, key=lambda trace: trace.legendrank)
    assert first.name == f"layer {row}, head {head}"
    steps = [record.step for record in run.probe]
    np.testing.assert_allclose(first.y, [sink(made, s)[row, head] for s in steps], atol=1e-4)
    (uniform,) = [trace for trace in figure.data if trace.name == "uniform"]
    assert uniform.line.dash == "dash"
    assert set(uniform.y) == {0.0741}
    (stars,) = [trace for trace in figure.data if trace.name == "sink formed"]
    assert list(stars.x) == [event.step for event in run.events]


def test_the_limit_of_a_sink_is_the_run_s_own(tmp_path):
    run = run_of(tmp_path)
    with open(run / "config.yaml", "a", encoding="utf-8") as file:
        file.write("telemetry:\n  sink: 0.4\n")
    names = [trace.name for trace in draw_sink_formation(read_run(run)).data]
    assert "limit of a sink, 0.4" in names


def test_baselines_are_drawn_once_per_kind_of_layer(tmp_path):
    for step in (0, 10):
        measures = {
            "alpha_0": Measure("head", np.full((3, 2), 0.1)),
            "uniform/alpha_0": Measure("layer", np.array([0.07, 0.2, 0.07])),
        }
        write_record(tmp_path, HeadRecord("probe", step, (0, 1, 2), measures))
    (tmp_path / "config.yaml").write_text("name: x\n", encoding="utf-8")
    figure = draw_sink_formation(read_run(tmp_path))
    uniform = [tuple(trace.y) for trace in figure.data if trace.name == "uniform"]
    assert sorted(uniform) == [(0.07, 0.07), (0.2, 0.2)]


def test_a_thinned_curve_keeps_its_peak_and_the_head_that_made_it(tmp_path):
    steps = np.arange(1, 3 * MOST_POINTS + 1)
    left_out = np.setdiff1d(steps, steps[thin(steps, MOST_POINTS)])
    highest = int(left_out[-1])
    (tmp_path / "config.yaml").write_text("name: x\n", encoding="utf-8")
    for step in steps.tolist():
        logits = np.ones((1, 4))
        logits[0, 2] += 500.0 * (step == highest)
        measures = {"max_logit": Measure("head", logits)}
        write_record(tmp_path, HeadRecord("train", step, (5,), measures))
    (line, limit) = draw_max_logit(read_run(tmp_path)).data
    assert len(line.x) <= MOST_POINTS
    at = int(np.argmax(line.y))
    assert (line.x[at], line.y[at], line.customdata[at]) == (highest, 501.0, 2)
    assert line.name == "layer 5"
    assert set(limit.y) == {1000.0}


def test_detectors_name_the_best_head(tmp_path):
    run = read_run(run_of(tmp_path))
    newest = run.probe[-1].measures["induction"].values
    row, head = np.unravel_index(newest.argmax(), newest.shape)
    figure = draw_detectors(run)
    assert figure.data[0].name == f"induction: layer {row}, head {head}"
    assert figure.data[0].y[-1] == newest.max()


def test_values_at_the_sink_show_the_lowest_key_value_head(tmp_path):
    run = read_run(run_of(tmp_path))
    figure = draw_sink_values(run)
    lowest = run.probe[-1].measures["sink_vnorm"].values.min(axis=1)
    np.testing.assert_allclose([t.y[-1] for t in figure.data[:4]], lowest, atol=1e-5)


def test_patterns_list_every_head_most_interesting_first(tmp_path):
    run = read_run(run_of(tmp_path, null_mass=True))
    newest = {name: run.probe[-1].measures[name].values for name in ("alpha_0", "induction")}
    heads = interesting_heads(run)
    assert len({(head.row, head.head) for head in heads}) == 16
    best = np.unravel_index(newest["alpha_0"].argmax(), (4, 4))
    assert (heads[0].row, heads[0].head) == best
    assert heads[0].reason == f"sink {newest['alpha_0'].max():.2f}"
    figure = draw_patterns(run)
    assert len(figure.layout.updatemenus[0].buttons) == 16
    assert figure.data[0].x[0] == NOTHING
    for row in figure.data[0].z:  # rows end at the last visible key and add up to 1
        assert sum(row) == pytest.approx(1, abs=0.05)
    assert [len(row) for row in figure.data[0].z] == list(range(2, 50))


def test_heads_come_in_their_own_order_where_no_probe_ranked_them(tmp_path):
    run = read_run(run_of(tmp_path))
    heads = interesting_heads(replace(run, probe=[]))
    assert [(head.row, head.head) for head in heads] == list(np.ndindex(4, 4))


def test_records_of_other_layers_are_left_out(tmp_path):
    run = run_of(tmp_path)
    measures = {"entropy_norm": Measure("head", np.ones((2, 4)))}
    write_record(run, HeadRecord("train", 2000, (1, 3), measures))
    assert [record.step for record in read_run(run).train] == [2000]
    page_of(run)


def test_the_command_prints_the_file(tmp_path, monkeypatch, capsys):
    run = run_of(tmp_path)
    (tmp_path / "latest").write_text(f"{run}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "latest")])
    assert main() == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"


@pytest.mark.parametrize("argument", ["no-such-run", "."])
def test_the_command_refuses_what_is_not_a_run_in_one_line(tmp_path, monkeypatch, capsys, argument):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / argument)])
    assert main() == 1
    message = capsys.readouterr().err
    assert message.startswith("report: ")
    assert message.count("\n") == 1


def test_a_missing_library_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, capsys):
    run = run_of(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(sys, "argv", ["report", str(run)])
    assert main() == 1
    expected = "report: the report needs plotly: pip install glassgpt[report]\n"
    assert capsys.readouterr().err == expected
    assert not (run / "report.html").exists()


def test_a_damaged_configuration_is_named_in_one_line(tmp_path):
    run = run_of(tmp_path)
    (run / "config.yaml").write_text("a: [1\nb", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.yaml is damaged: ") as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


def test_a_report_can_be_written_again_over_an_old_one(tmp_path):
    run = run_of(tmp_path)
    write_report(run)
    shutil.rmtree(run / FOLDER)
    assert "telemetry=default" in write_report(run).read_text(encoding="utf-8")
