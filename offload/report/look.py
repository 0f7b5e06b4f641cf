"""How the page looks, in light, in dark and on paper; and the pointer that says the numbers of a chart."""

STYLE = """
:root { color-scheme: light dark; --back: #fafafa; --card: #fff; --ink: #1b1f24; --soft: #5b6470; --rule: #e3e6ea;
  --blue: #2f6fd0; --green: #1f8f6b; --orange: #d9730d; --magenta: #bd3b8a; --violet: #7a5bc7; --yellow: #b08900;
  --gray: #87909c; --red: #c93a3a; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1c2025; --ink: #e8eaed; --soft: #a0a8b3;
  --rule: #30363d; --blue: #6ea8fe; --green: #4cc29a; --orange: #f0a04b; --magenta: #e580bd; --violet: #ab92ec;
  --yellow: #d9b83f; --gray: #7d8793; --red: #f07878; } }
@media print { :root { color-scheme: light; --back: #fff; --card: #fff; --ink: #000; --soft: #444; --rule: #ccc;
  --blue: #2f6fd0; --green: #1f8f6b; --orange: #d9730d; --magenta: #bd3b8a; --violet: #7a5bc7; --yellow: #b08900;
  --gray: #87909c; --red: #c93a3a; }
  figure, table, .tiles div { break-inside: avoid } #tip { display: none } h2 { break-after: avoid }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact } }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 40px }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px } h2 { font-size: 18px; margin: 34px 0 10px }
header p, .note, footer { color: var(--soft) } header p { margin: 0; overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 22px 0 0 }
.tiles div, figure, .wide:not(figure) { background: var(--card); border: 1px solid var(--rule); border-radius: 8px }
.tiles div { padding: 12px 14px } dt { color: var(--soft); font-size: 13px } dd { margin: 0; font-size: 18px;
  font-weight: 600; font-variant-numeric: tabular-nums }
dd.sub { font-size: 13px; font-weight: 400; color: var(--soft) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 14px }
.wide { grid-column: 1 / -1 } div.wide, p.wide { padding: 12px 16px; margin: 0; overflow-x: auto }
div.wide p { margin: 0 0 8px }
figure { margin: 0; padding: 12px 14px 8px; min-width: 0 } figcaption { font-weight: 600 }
svg { display: block; width: 100%; height: auto; margin-top: 4px; overflow: visible }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 0; padding: 0; font-size: 13px;
  color: var(--soft) }
.legend li::before, td i { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  background: var(--c); margin-right: 6px }
.note { font-size: 13px; margin: 4px 0 2px }
.grid { stroke: var(--rule) } .tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round } .dot { fill: var(--c) }
.band { fill: var(--c); opacity: .2 } .area, .span { fill: var(--c) } .span { opacity: .85 }
.label { paint-order: stroke; stroke: var(--card); stroke-width: 4px }
.bound { stroke: var(--soft); stroke-dasharray: 2 3 } .resumed { stroke: var(--soft); stroke-dasharray: 5 4 }
.cursor { stroke: var(--ink); opacity: 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th { color: var(--soft); font-weight: 500 }
th, td { padding: 4px 22px 4px 0; text-align: right; border-bottom: 1px solid var(--rule) }
th, td:not(:first-child) { white-space: nowrap }
th:first-child, td:first-child { text-align: left } tr:last-child td { border-bottom: 0 }
footer { margin-top: 30px; font-size: 13px }
#tip { position: fixed; pointer-events: none; opacity: 0; background: var(--ink); color: var(--back); padding: 6px 10px;
  border-radius: 6px; font-size: 13px; white-space: pre; font-variant-numeric: tabular-nums; z-index: 2 }
"""

SCRIPT = """
const tip = document.getElementById("tip");
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let at = 0;
    chart.x.forEach((each, index) => { if (Math.abs(each - x) < Math.abs(chart.x[at] - x)) at = index; });
    cursor.setAttribute("x1", chart.x[at]); cursor.setAttribute("x2", chart.x[at]); cursor.style.opacity = .5;
    const said = index => chart.rows[index][at] === null ? "none" : `${chart.rows[index][at]} ${chart.unit}`;
    tip.textContent = [chart.step[at], ...chart.names.map((name, index) => `${name}: ${said(index)}`)].join("\\n");
    tip.style.opacity = 1;
    const left = event.clientX + 14, most = innerWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, left > most ? event.clientX - tip.offsetWidth - 14 : left)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.style.opacity = 0; cursor.style.opacity = 0; });
}
"""
