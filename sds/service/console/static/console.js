"use strict";

// The queue's list: j and k move to the next and previous case while one has the focus.
{
  const list = document.querySelector("[data-list]");
  list?.addEventListener("keydown", (event) => {
    const step = { j: 1, k: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const links = [...list.querySelectorAll("a.event")];
    const next = links[links.indexOf(document.activeElement) + step];
    if (next && links.includes(document.activeElement)) {
      event.preventDefault();
      next.focus();
    }
  });
}

// The live page: refresh its figures, unless the keyboard focus is in them, the page is hidden, or it is paused.
{
  const EVERY_MS = 3000;
  const now = document.querySelector("[data-live]");
  const pause = document.getElementById("pause");
  const ended = document.getElementById("ended");
  const stale = document.getElementById("stale");
  const LATE_TICKS = 3;
  let paused = false;
  let unanswered = 0; // ticks since the last question that has no answer yet

  // Logged out: the figures go, what was typed stays, and who types goes on.
  const end = () => {
    paused = true;
    now.replaceChildren();
    stale.hidden = true;
    ended.hidden = false;
    if (!document.activeElement.closest("form")) ended.focus();
  };

  const renew = async () => {
    if (unanswered && ++unanswered > LATE_TICKS) stale.hidden = false;
    if (unanswered || paused || document.hidden || now.contains(document.activeElement)) return;
    unanswered = 1;
    try {
      const answer = await fetch(now.dataset.live, { credentials: "same-origin", redirect: "manual" });
      if (answer.type === "opaqueredirect") return end();
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      const fresh = new DOMParser().parseFromString(text, "text/html").body;
      const halted = fresh.querySelector("#halted"), shown = document.getElementById("halted");
      halted.remove();
      if (shown.textContent !== halted.textContent) shown.replaceChildren(...halted.childNodes); // it is said aloud
      if (!now.contains(document.activeElement)) now.replaceChildren(...fresh.childNodes);
      stale.hidden = true;
    } catch {
      stale.hidden = false;
    } finally {
      unanswered = 0;
    }
  };

  if (now && pause) {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.setAttribute("aria-pressed", String(paused));
    });
    setInterval(renew, EVERY_MS);
  }
}

// What was refused is not sent again by the browser's Back or Reload: they ask for its page.
if (document.getElementById("refused") && location.pathname !== "/console/login") history.replaceState(null, "", location.href);

// Send a form once, however often its button is pressed; again after a while, since a browser lets people stop what is slow.
const AGAIN_MS = 10_000;
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.sent) return event.preventDefault();
  form.dataset.sent = "yes";
  setTimeout(() => delete form.dataset.sent, AGAIN_MS);
});
window.addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});

// What is typed about a case stays while it is taken or given back, which makes its page anew. The box that confirms does not.
try {
  const KEPT = "typed";
  const texts = ".decide form:not(.take) input:is([type=number], :not([type])), .decide select";
  document.querySelector("form.take")?.addEventListener("submit", () => {
    const typed = [...document.querySelectorAll(texts)].map((field) => [field.id, field.value]);
    sessionStorage.setItem(KEPT, JSON.stringify({ page: location.pathname, typed }));
  });
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  sessionStorage.removeItem(KEPT);
  for (const [id, text] of kept.page === location.pathname ? kept.typed : []) {
    const field = document.getElementById(id);
    if (!field || !text || (field.tagName !== "SELECT" && field.value)) continue; // the page has what was refused
    field.value = text;
    if (field.tagName !== "SELECT" && field.closest("details")) field.closest("details").open = true;
  }
} catch {
  // a browser that keeps nothing for its pages
}
