
const form = document.querySelector("form");
const rows = [...document.querySelectorAll("#requirements tbody tr")];
function filter() {
  const text = form.text.value.toLowerCase(), outcome = form.outcome.value;
  const chosen = form.implementation.selectedIndex - 1;
  let shown = 0;
  for (const row of rows) {
    const cells = [...row.cells].slice(1).filter((cell, place) => chosen < 0 || place === chosen);
    const keep = row.textContent.toLowerCase().includes(text)
      && (!form.area.value || row.dataset.area === form.area.value)
      && (!form.level.value || row.dataset.level === form.level.value)
      && (!outcome || cells.some(cell => [cell.dataset.outcome, cell.className].includes(outcome)));
    row.hidden = !keep;
    shown += keep;
  }
  for (const row of document.querySelectorAll(":is(#verdicts, #requirements) tr"))
    [...row.cells].slice(1).forEach((cell, place) => {
      cell.hidden = chosen >= 0 && place !== chosen;
    });
  document.querySelector("output").value = shown + " of " + rows.length + " requirements";
}
// The address says what is shown, so that it can be given to somebody: "#area=ckpt-wrap&outcome=fail",
// or words to search for, such as the id of a requirement.
function follow() {
  const said = location.hash.slice(1), place = document.getElementById(said);
  const words = place && !rows.includes(place) ? "" : decodeURIComponent(said);
  const asked = new URLSearchParams(said.includes("=") ? said : {text: words});
  for (const field of form.querySelectorAll("[name]")) {
    field.value = asked.get(field.name) ?? "";
    if (field.selectedIndex < 0) field.selectedIndex = 0;
  }
  filter();
}
form.addEventListener("input", () => {
  const asked = [...new FormData(form)].filter(([, value]) => value);
  history.replaceState(null, "", "#" + new URLSearchParams(asked));
  filter();
});
form.addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", () => {
  if (!location.hash.includes("=")) return;
  follow();
  form.scrollIntoView();
});
follow();
