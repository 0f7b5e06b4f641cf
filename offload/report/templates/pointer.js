// The pointer over a chart shows the numbers of that step.
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
    tip.textContent = [chart.step[at], ...chart.names.map((name, index) => `${name}: ${said(index)}`)].join("\n");
    tip.style.opacity = 1;
    const left = event.clientX + 14, most = innerWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, left > most ? event.clientX - tip.offsetWidth - 14 : left)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.style.opacity = 0; cursor.style.opacity = 0; });
}
