"use strict";
// Every page: theme, tips of marks by pointer and by arrow keys, groups of a rank, buttons that copy.
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  try { theme = localStorage.getItem("threefold-theme") || "auto"; } catch { /* a file without storage */ }
  const wear = (name) => {
    theme = themes.includes(name) ? name : "auto";
    if (theme === "auto") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", theme);
    button.textContent = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme of the page: ${theme}`);
  };
  wear(theme);
  button.addEventListener("click", () => {
    wear(themes[(themes.indexOf(theme) + 1) % themes.length]);
    try { localStorage.setItem("threefold-theme", theme); } catch { /* it lasts as long as the page */ }
  });

  // A title inside a mark is for browsers without scripts: the browser would show it beside our own tip.
  const says = (mark) => {
    const title = mark.querySelector(":scope > title");
    if (title) {
      mark.dataset.tip = title.textContent;
      mark.setAttribute("aria-label", title.textContent);
      mark.setAttribute("role", "img");
      title.remove();
    }
    return mark.dataset.tip || "";
  };
  let now = null, byKey = false;
  const leave = () => {
    if (now) { now.classList.remove("now"); unlight(now); }
    now = null;
    tip.hidden = true;
  };
  const show = (mark, x, y) => {
    if (now !== mark) { leave(); now = mark; mark.classList.add("now"); light(mark); }
    tip.textContent = says(mark);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  };
  const grids = (mark) => mark.dataset.rank === undefined ? null : mark.closest(".grids");
  const unlight = (mark) => {
    const all = grids(mark);
    if (!all) return;
    all.classList.remove("lit");
    all.querySelectorAll(".on, .self").forEach((cell) => cell.classList.remove("on", "self"));
  };
  const light = (mark) => {
    const all = grids(mark);
    if (!all) return;
    const rank = Number(mark.dataset.rank);
    all.classList.add("lit");
    all.querySelectorAll(".axis").forEach((axis) => {
      const stride = Number(axis.dataset.stride), degree = Number(axis.dataset.degree);
      const first = rank - Math.floor(rank / stride) % degree * stride;
      axis.querySelectorAll("[data-r]").forEach((cell) => {
        const steps = (Number(cell.dataset.r) - first) / stride;
        cell.classList.toggle("on", Number.isInteger(steps) && steps >= 0 && steps < degree);
        cell.classList.toggle("self", Number(cell.dataset.r) === rank);
      });
    });
  };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest ? event.target.closest(".mark") : null;
    if (mark) { byKey = false; show(mark, event.clientX, event.clientY); } else if (!byKey) leave();
  });
  const follow = () => {
    if (!now) return;
    const box = now.getBoundingClientRect();
    if (byKey) show(now, box.left + box.width / 2, box.bottom - 8); else leave();
  };
  document.addEventListener("scroll", follow, { capture: true, passive: true });
  document.addEventListener("focusout", (event) => { if (event.target.classList.contains("drawing")) leave(); });
  document.addEventListener("keydown", (event) => {
    const drawing = event.target.closest ? event.target.closest(".drawing") : null;
    if (event.key === "Escape") leave();
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!drawing || !step) return;
    const marks = [...drawing.querySelectorAll(".mark")];
    if (!marks.length) return;
    event.preventDefault();
    const place = now && drawing.contains(now) ? marks.indexOf(now) + step : step > 0 ? 0 : marks.length - 1;
    const next = marks[Math.max(0, Math.min(marks.length - 1, place))];
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
    byKey = true;
    leave();
    now = next;
    next.classList.add("now");
    light(next);
    follow();
  });
  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("[data-copy]");
    if (!copy) return;
    const text = copy.parentElement.querySelector("pre").textContent;
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(copy.parentElement.querySelector("pre"));
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
})();
