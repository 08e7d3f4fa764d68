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
  let paused = false;

  // Logged out: the figures go, what was typed stays, and who types goes on.
  const end = () => {
    paused = true;
    now.replaceChildren();
    stale.hidden = true;
    ended.hidden = false;
    if (!document.activeElement.closest("form")) ended.focus();
  };

  const renew = async () => {
    if (paused || document.hidden || now.contains(document.activeElement)) return;
    try {
      const answer = await fetch(now.dataset.live, { credentials: "same-origin", redirect: "manual" });
      if (answer.type === "opaqueredirect") return end();
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      const fresh = new DOMParser().parseFromString(text, "text/html").body;
      if (!now.contains(document.activeElement)) now.replaceChildren(...fresh.childNodes);
      stale.hidden = true;
    } catch {
      stale.hidden = false;
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

// Send a form once, however often its button is pressed.
document.addEventListener("submit", (event) => {
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
});
window.addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});
