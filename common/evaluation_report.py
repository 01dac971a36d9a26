"""report.json and report.html of an evaluation: figures in, two files out, nothing computed here.

report.json holds the figures as they were given, report.html the same for a person: one file that
loads nothing, with tables, plots and the definition of every figure. A part of the page is a
function of the report in SECTIONS; it returns "" when the report has nothing for it.
"""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.evaluation_plots import groups_plot, histogram_plot, slots_plot
from common.run import json_bytes, write_atomic

Report = Mapping[str, Any]

JSON_FILE, HTML_FILE = "report.json", "report.html"
GROUP_TITLES = {
    "source": "By source",
    "part": "By part: thinking or answer",
    "length": "By length of the row, in tokens",
    "position": "By position in the completion: tokens generated before",
}
DEFINITIONS = (
    ("anchor", "A generated token whose successor was generated too: a block of B slots may start "
     "there. Slot 0 is the anchor itself, slots 1 to B-1 are drafts."),
    ("acceptance length", "Tokens that one step of the target yields: the drafts before the first "
     "wrong one, and one token of the target's own. From 1 to B. The text is the target's own "
     "completion, and a draft is right when the drafter's most likely token is the text's "
     "(simulated: nothing is generated)."),
    ("all anchors", "Every anchor of every row is drafted from. Easy stretches, which serving "
     "would jump over, are counted at each of their tokens, so this is mostly higher than "
     "serving."),
    ("walked", "Starts at the first generated token of a row and jumps by what was accepted, as "
     "serving does. On text that the target generated greedily this is the greedy decoding loop."),
    ("token-weighted", "All rows together: sum of tokens / number of target steps (of anchors), "
     "so long rows weigh more. Mean of rows: each row's own figure, then the mean."),
    ("expected", "For sampling at temperature T with the lossless rejection rule: 1 + sum over k "
     "of the product of a_1 ... a_k, with a_i = sum over the vocabulary of min(p, q). p is the "
     "target's distribution at the place before slot i's token, from its last hidden state, q the "
     "drafter's at slot i; mean over all anchors."),
    ("accuracy of a slot", "Right drafts / judged drafts of the slot. Conditional: only blocks "
     "whose drafts before it are all right, which is what acceptance depends on."),
    ("zeroed, shifted", "The same with hidden states that are zero, or one token late within each "
     "row. Accepted drafts are the acceptance length less 1. A drafter that keeps 80 % of them, "
     "at 1.2 tokens a step or more, owes little to the target: look for a mistake in labels, mask "
     "or taps before you serve it."),
    ("speed-up", "walked acceptance length / (1 + c): c is the cost of drafting a block over that "
     "of a target step. By default c = (drafter + head) / (target with head) in parameters, which "
     "is right where reading weights is what takes the time, as with few requests at once; give "
     "a measured one as --draft-cost. Shorter blocks are this drafter's, cut. Break-even is the "
     "acceptance length at which drafting costs what it brings, 1 + c."),
)  # fmt: skip
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 66em;
       margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0.2em; } h2 { font-size: 1.2em; margin-top: 2em; }
.what { color: #555; margin-top: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 0.6em 0; }
th, td { padding: 0.25em 0.9em 0.25em 0; border-bottom: 1px solid #e3e6ea; text-align: right; }
th { color: #555; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.big { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.2em 0; }
.big div { border: 1px solid #e3e6ea; border-radius: 6px; padding: 0.6em 1.1em; }
.big b { display: block; font-size: 1.7em; } .big span { color: #555; }
.good, .bad, .unsure { border-left: 4px solid; padding: 0.4em 0.8em; }
.good { border-color: #3a8f5c; background: #eef7f1; }
.bad { border-color: #c0392b; background: #fcefed; }
.unsure { border-color: #d9a52b; background: #fdf7e7; }
.plot { display: flex; flex-wrap: wrap; gap: 0.5em 2em; align-items: flex-start; margin: 1em 0; }
.plot img { flex: 0 1 32em; min-width: 0; max-width: 100%; }
dt { font-weight: 600; margin-top: 0.5em; } dd { margin-left: 1.2em; color: #333; }
"""


def write_report(folder: Path, report: Report) -> None:
    """Write report.json and report.html in `folder`."""
    write_atomic(folder / JSON_FILE, json_bytes(report))
    write_atomic(folder / HTML_FILE, report_html(report).encode())


def report_html(report: Report) -> str:
    """The whole page, without a script or anything from elsewhere."""
    title = f"Acceptance of {report['drafter']['path']}"
    body = "\n".join(section(report) for section in SECTIONS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


# ---- the parts of the page


def what_part(report: Report) -> str:
    """What was judged, on which rows, and what to know before reading on."""
    drafter = report["drafter"]
    step = "" if drafter["step"] is None else f"step {drafter['step']:,} · "
    text = (
        f"{step}{drafter['parameters']:,} parameters · {drafter['layers']} layers · blocks of "
        f"{report['block_size']} · target {report['target']} · {report['rows']:,} rows of "
        f"{report['data']} · {report['anchors']:,} anchors"
    )
    notes = "".join(f'<p class="unsure">{html.escape(note)}</p>' for note in report["notes"])
    return f'<p class="what">{html.escape(text)}</p>{notes}'


def acceptance_part(report: Report) -> str:
    """The acceptance lengths, big, and then by kind of mean."""
    simulated, expected = report["simulated"], report["expected"]
    big = [
        ("walked, as in serving", simulated["walked"]),
        ("mean over all anchors", simulated["all_anchors"]),
    ]
    if expected is not None:
        big.append(
            (f"expected at temperature {expected['temperature']:g}", expected["all_anchors"])
        )
    boxes = "".join(f"<div><b>{value:.2f}</b><span>{label}</span></div>" for label, value in big)
    rows = [
        ("walked", _number(simulated["walked"]), _number(simulated["walked_row_mean"])),
        ("all anchors", _number(simulated["all_anchors"]), _number(simulated["row_mean"])),
    ]
    if expected is not None:
        label = f"expected, T = {expected['temperature']:g}"
        rows.append((label, _number(expected["all_anchors"]), _number(expected["row_mean"])))
    return (
        f'<div class="big">{boxes}</div><h2>Acceptance length, tokens of a target step</h2>'
        + _table(("", "token-weighted", "mean of rows"), rows)
        + f"<p>Loss, cross-entropy with position decay: {report['loss']:.4f}</p>"
    )


def real_part(report: Report) -> str:
    """What decoding for real gave; nothing where no row was decoded."""
    real = report.get("real")
    if real is None:
        return ""
    plain = real["plain_tokens_per_s"]
    rows = [
        (label, _number(found["tokens_per_step"]), _number(found["row_mean"]),
         f"{found['tokens']:,}", f"{found['steps']:,}", f"{found['tokens_per_s']:,.1f}",
         f"{found['tokens_per_s'] / plain:.2f}x" if plain else "-")
        for label, found in (
            ("greedy", real["greedy"]), (f"sampled, T = {real['temperature']:g}", real["sampled"])
        )
    ]  # fmt: skip
    heads = ("", "token-weighted", "mean of rows", "tokens", "steps", "tokens/s", "of plain")
    text = (
        f"{real['rows']:,} prompts, completed by the target with this drafter. Simulated and "
        f"walked, the same rows have {real['walked']:.3f}. Greedy text is what the target says "
        f"without a drafter in {real['same_text']:,} of them, and its completion in the data in "
        f"{real['own_text']:,}; plain decoding makes {plain:,.1f} tokens/s here."
    )
    return f"<h2>Real decoding</h2>{_table(heads, rows)}<p>{html.escape(text)}</p>"


def controls_part(report: Report) -> str:
    """The acceptance on hidden states that are wrong: whether the drafter uses its context."""
    kind = {"ignored": "bad", "unknown": "unsure", "used": "good"}[report["context"]]
    rows = [
        (
            control["name"],
            _number(control["control"]),
            _number(control["real"]),
            "-" if control["share"] is None else f"{control['share']:.0%}",
        )
        for control in report["controls"]
    ]
    return (
        f'<h2>Does the drafter use its context?</h2><p class="{kind}">'
        f"{html.escape(report['verdict'][:1].upper() + report['verdict'][1:])}.</p>"
        + _table(("hidden states", "acceptance", "with real ones", "accepted drafts left"), rows)
    )


def slots_part(report: Report) -> str:
    """Accuracy by slot, and how often each length was accepted."""
    slots, histogram = report["slots"], report["histogram"]
    heads = ["slot", "accuracy", "all before right"] + (["sum min(p, q)"] * ("overlap" in slots))
    columns = [slots["accuracy"], slots["conditional_accuracy"]]
    columns += [slots["overlap"]] if "overlap" in slots else []
    rows = [
        (str(slot), *(_share(value) for value in values))
        for slot, values in enumerate(zip(*columns, strict=True), start=1)
    ]
    counts = [
        (str(length), f"{count:,}", _share(count / sum(histogram)))
        for length, count in enumerate(histogram, start=1)
    ]
    return (
        "<h2>Histogram and slots</h2>"
        + _beside(
            histogram_plot(histogram), "acceptance lengths", ("tokens", "anchors", "share"), counts
        )
        + _beside(slots_plot(slots), "drafts by slot", heads, rows)
    )


def speed_part(report: Report) -> str:
    """The speed-up to expect of each block size; nothing without a known cost of a draft."""
    speed = report["speed"]
    if speed is None:
        return ""
    rows = [
        (
            str(block["block_size"]),
            _number(block["walked"]),
            _number(block["all_anchors"]),
            f"{block['speed_up']:.2f}x",
            f"{block['break_even']:.2f}",
            _share(block["break_even_rate"]),
        )
        for block in speed["blocks"]
    ]
    heads = ("block", "walked", "all anchors", "speed-up", "break-even length",
             "break-even share of drafts")  # fmt: skip
    return (
        "<h2>Expected speed-up</h2>"
        f"<p>Drafting a block costs c = {speed['draft_cost']:.3f} target steps "
        f"({html.escape(speed['from'])}).</p>" + _table(heads, rows)
    )


def groups_part(report: Report) -> str:
    """The acceptance by kind of row."""
    parts = []
    for kind, groups in report["groups"].items():
        expected = report["expected"] is not None
        heads = ["", "rows", "anchors", "acceptance"] + ["expected"] * expected
        rows = [
            (
                group["label"], f"{group['rows']:,}", f"{group['anchors']:,}",
                _number(group["acceptance_length"]),
                *([_number(group["expected_acceptance_length"])] if expected else ()),
            )
            for group in groups
        ]  # fmt: skip
        title = GROUP_TITLES[kind]
        plot = groups_plot(groups, title=title, mean=report["simulated"]["all_anchors"])
        parts.append(_beside(plot, title, heads, rows))
    return "<h2>Where it drafts well (mean over all anchors)</h2>" + "\n".join(parts)


def definitions_part(report: Report) -> str:
    """What each figure of the page means."""
    entries = "".join(
        f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in DEFINITIONS
    )
    return f"<h2>Definitions</h2><dl>{entries}</dl>"


SECTIONS = (
    what_part,
    acceptance_part,
    real_part,
    controls_part,
    slots_part,
    speed_part,
    groups_part,
    definitions_part,
)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _beside(svg: bytes, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plot with its table at its side."""
    data = base64.b64encode(svg).decode()
    image = f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'
    return f'<div class="plot">{image}{_table(heads, rows)}</div>'


def _number(value: float) -> str:
    return f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
