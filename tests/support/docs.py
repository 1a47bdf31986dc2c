"""What of docs/ is made from the program: settings, questions, figures. ``scripts/docs`` writes it, a test compares."""

from __future__ import annotations

import re
from pathlib import Path

from indexd.config.model import KEYS, SECTIONS, env_name, flag_name
from indexd.query import QUESTIONS
from indexd.query.questions import Flags
from indexd.serve.daemon_status import FIELDS
from indexd.serve.metrics import FAMILIES, HISTOGRAMS, PREFIX, exposed

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
METRICS = PAGE.with_name("metrics.md")
QUERY_PAGE = PAGE.with_name("query.md")
_QUESTIONS = re.compile(r"(?<=<!-- questions: made by scripts/docs -->\n).*(?=\n<!-- end -->)", re.DOTALL)
_HEAD = """\
# Configuration

Made by `scripts/docs` from the settings; do not edit it.

Each key is a flag of every command that uses it (`indexd COMMAND --help-all`), a key in
[config/indexd.toml](../config/indexd.toml), which says the reason of each, and a variable in the environment. Flags win
over the environment, that over the file given with `-c` (else `/etc/indexd/indexd.toml`), that over the broker's own
file given with `--broker-conf`, that over the default. A wrong value is refused with its source.

Sizes are bytes, or text such as `64MiB`, `100MB`; durations a number in the key's unit, or text such as `500ms`, `1h`.
"""


def configuration() -> str:
    """The whole page: a table for each section of the configuration file."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(f"\n## [{section}]\n\n| key, flag, environment | type | default | meaning |\n|---|---|---|---|\n")
        for key, info in KEYS.items():
            if info.section == section:
                names = f"`{key}` `{flag_name(key)}` `{env_name(key)}`"
                kind = f"{info.type}, {info.bounds}" if info.bounds else info.type
                cells = [text.replace("|", "\\|") for text in (names, kind, info.default or "none", info.description)]
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def metrics(page: str) -> str:
    """docs/metrics.md with its tables as they are now, each between two marks."""
    rows = [("metric, behind `indexd_`", "type", "unit", "meaning"), ("---",) * 4]
    for found in FAMILIES:
        labels = f"{{{','.join(found.labels)}}}" if found.labels else ""
        kind = "gauge" if found.kind == "info" else found.kind
        rows.append((f"`{exposed(found).removeprefix(PREFIX)}{labels}`", kind, found.unit, found.help))
    rows += [(f"`{name}`", "histogram", "seconds", words) for name, words in HISTOGRAMS.items()]
    keys = [("key", "metric", "meaning"), ("---",) * 3]
    for found in FIELDS:
        metric = "" if found.kind == "text" else f"`{exposed(found).removeprefix(PREFIX)}`"
        keys.append(("`" + ".".join(found.path) + "`", metric, found.help))
    for mark, table in (("metrics", rows), ("keys", keys)):
        lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        head, _, rest = page.partition(f"<!-- {mark} -->\n")
        page = f"{head}<!-- {mark} -->\n{lines}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def questions(page: str) -> str:
    """``page`` with the table of all questions' options, by which they are asked on the command line and over HTTP."""
    rows = ["| command | option | field | meaning |", "|---|---|---|---|"]
    for model in QUESTIONS:
        for name, field in model.model_fields.items():
            flags = next(said for said in field.metadata if isinstance(said, Flags))
            names = ", ".join(f"`{flag}`" for flag in flags.names)
            rows.append(f"| `{model.command}` | {names} | `{name}` | {field.description} |")
    return _QUESTIONS.sub("\n".join(rows), page)


if __name__ == "__main__":
    METRICS.write_text(metrics(METRICS.read_text("utf-8")), encoding="utf-8")
    PAGE.write_text(configuration(), encoding="utf-8")
    QUERY_PAGE.write_text(questions(QUERY_PAGE.read_text("utf-8")), encoding="utf-8")
