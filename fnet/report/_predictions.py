"""The predictions of a classifier in a report: confusion matrix, most frequent confusions, worst
mistakes."""

from __future__ import annotations

from html import escape

from fnet.report._read import Run

_CLASSES = 30  # a larger matrix is shown as a list of its largest entries
_STEPS = (0.002, 0.01, 0.03, 0.1, 0.3)  # shares of the true class at which the color changes


def html(run: Run, name: str, several: bool) -> str:
    if not run.predictions:
        return ""
    classes, counts = run.predictions["classes"], run.predictions["confusion"]
    total, right = sum(map(sum, counts)), sum(row[i] for i, row in enumerate(counts))
    accuracy = "no examples"
    if total:
        accuracy = f"accuracy {right / total:.4f}: {total - right:,} of {total:,} examples wrong"
    heading = f"<h3>{escape(name)}</h3>" if several else ""
    matrix = _matrix(classes, counts) if len(classes) <= _CLASSES else ""
    return (
        f'<article class="card">{heading}<p>{accuracy}</p><div class="columns">{matrix}{_pairs(classes, counts)}'
        f"</div>{_mistakes(run.predictions['mistakes'])}</article>"
    )


def _matrix(classes, counts) -> str:
    heads = "".join(f'<th scope="col"><span>{escape(label)}</span></th>' for label in classes)
    rows = []
    for i, (label, row) in enumerate(zip(classes, counts)):
        whole = sum(row) or 1
        cells = "".join(
            f'<td class="{"right" if i == j else f"m{sum(n / whole >= step for step in _STEPS)}"}" '
            f'title="{escape(label)} taken for {escape(classes[j])}: {n:,} ({100 * n / whole:.1f} %)">{n or ""}</td>'
            for j, n in enumerate(row)
        )
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    return (
        '<div class="scroll"><table class="matrix"><caption>rows: true class, columns: predicted class; color: '
        f"share of the true class</caption><tr><td></td>{heads}</tr>{''.join(rows)}</table></div>"
    )


def _pairs(classes, counts) -> str:
    pairs = sorted(
        ((n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if i != j and n),
        reverse=True,
    )
    rows = "".join(
        f'<tr><td>{escape(classes[i])}</td><td>{escape(classes[j])}</td><td class="number">{n:,}</td></tr>'
        for n, i, j in pairs[:10]
    )
    return (
        f'<table class="pairs"><caption>most frequent confusions</caption><tr><th>true</th><th>predicted</th>'
        f'<th class="number">count</th></tr>{rows}</table>'
        if rows
        else "<p>There are no mistakes.</p>"
    )


def _mistakes(mistakes) -> str:
    if not mistakes:
        return ""
    figures = []
    for each in mistakes:
        sure = (
            ""
            if each["probability"] is None
            else f", {100 * each['probability']:.1f}\N{NO-BREAK SPACE}%"
        )
        text = f"{each['label']} taken for {each['guess']}{sure}"
        image = (
            f'<img src="{each["image"]}" alt="{escape(text)}" loading="lazy">'
            if each["image"]
            else ""
        )
        index = (
            "" if each["index"] is None else f'<span class="soft">example {each["index"]}</span>'
        )
        figures.append(
            f"<figure>{image}<figcaption><b>{escape(each['label'])}</b> taken for "
            f"<b>{escape(each['guess'])}</b>{sure}{index}</figcaption></figure>"
        )
    return (
        f'<h3>Worst mistakes, the surest first</h3><div class="mistakes">{"".join(figures)}</div>'
    )
