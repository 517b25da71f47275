// Rows of a batch: the search form, requests that arrive after their rows, and copying.

import { find, notice, say } from "./words.js";

/** Put each request that was fetched next to its row. */
export function placeRequests() {
  for (const request of document.querySelectorAll("#row-requests > [data-line]")) {
    find(`#request-${request.dataset.line}`)?.replaceChildren(...request.childNodes);
    request.remove();
  }
}

/** Open the address of a search when its form is sent; copy the code of a copy button. */
export function wireRows() {
  document.body.addEventListener("submit", (event) => {
    if (!event.target.matches("#row-search")) return; // its `id` is the field with that name
    event.preventDefault();
    const given = [...new FormData(event.target)].filter(([, value]) => value.trim() !== "");
    location.hash = `${event.target.dataset.page}?${new URLSearchParams(given)}`;
  });
  document.body.addEventListener("click", async (event) => {
    const source = event.target.closest("button")?.dataset.copy;
    if (!source) return;
    try {
      await navigator.clipboard.writeText(find(`#${source}`).textContent);
      say("Copied.");
    } catch {
      notice("The browser does not allow copying: select the text and copy it.");
    }
  });
}
