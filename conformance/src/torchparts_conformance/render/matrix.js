
const form = document.querySelector("form");
const rows = [...document.querySelectorAll("#requirements tbody tr")];
function filter() {
  const text = form.text.value.toLowerCase(), outcome = form.outcome.value;
  const chosen = form.column.value === "" ? null : Number(form.column.value);
  let shown = 0;
  for (const row of rows) {
    const cells = [...row.cells].slice(1).filter((cell, place) => chosen === null || place === chosen);
    const keep = row.textContent.toLowerCase().includes(text)
      && (!form.area.value || row.dataset.area === form.area.value)
      && (!form.level.value || row.dataset.level === form.level.value)
      && (!outcome || cells.some(cell => cell.dataset.outcome === outcome));
    row.hidden = !keep;
    shown += keep;
  }
  for (const row of document.querySelectorAll("tr"))
    [...row.cells].slice(1).forEach((cell, place) => {
      cell.hidden = chosen !== null && place !== chosen;
    });
  document.querySelector("output").value = shown + " of " + rows.length + " requirements";
}
form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
form.text.value = decodeURIComponent(location.hash.slice(1));
filter();
