// The explorer: reads the controls, asks the server, and puts the markup of the answer into its places.
(() => {
  const form = document.getElementById("controls");
  const trouble = document.getElementById("trouble");
  const say = (text) => { trouble.textContent = text; trouble.hidden = !text; };

  const fields = () => {
    const found = {}, usual = {};
    for (const one of form.elements) {
      if (!one.name) continue;
      if (one.dataset.list !== undefined) {
        found[one.name] ||= [];
        usual[one.name] ||= [];
        if (one.checked) found[one.name].push(one.value);
        if (one.dataset.default === "true") usual[one.name].push(one.value);
      } else if (one.type === "checkbox") {
        if (String(one.checked) !== one.dataset.default) found[one.name] = one.checked;
      } else if (one.value.trim() !== "") {
        const text = one.value.trim().replaceAll(",", "").replaceAll("_", "");
        found[one.name] = one.tagName === "INPUT" && /^-?\d+(\.\d+)?$/.test(text) ? Number(text) : one.value.trim();
      }
    }
    for (const [name, names] of Object.entries(usual)) {
      if (String(found[name]) === String(names)) delete found[name];
    }
    return found;
  };

  const ask = async (path, body, signal) => {
    const answer = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error || answer.statusText);
    return value;
  };

  const put = (name, markup) => {
    const place = document.getElementById(name === "tiles" || name === "line" ? name : `at-${name}`);
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    place.innerHTML = markup;
    place.querySelectorAll("details").forEach((one, i) => { one.open = Boolean(open[i]); });
    const section = place.closest("section");
    if (section && name !== "findings") section.hidden = markup === "";
  };

  let asking = null, again = 0;
  const refresh = async () => {
    if (asking) asking.abort();
    asking = new AbortController();
    const mine = asking;
    try {
      const found = await ask("/answer", fields(), mine.signal);
      for (const [name, markup] of Object.entries(found.html)) put(name, markup);
      document.documentElement.dataset.answered = String(++again);
      document.documentElement.dataset.milliseconds = String(found.milliseconds);
      say("");
      document.getElementById("try").hidden = !document.querySelector("#at-findings .findings");
      document.getElementById("try").textContent = "Try fixes";
      searchLater();
      location.replace(`#${new URLSearchParams({ plan: JSON.stringify(fields()) })}`);
    } catch (error) {
      if (error.name !== "AbortError") say(`No answer: ${error.message}. Does threefold explore still run?`);
    }
  };
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(refresh, 40); };

  const set = (changes) => {
    for (const [path, value] of Object.entries(changes)) {
      const all = [...form.elements].filter((one) => one.name === path);
      for (const one of all) {
        const usual = one.dataset.default === "true";
        if (one.dataset.list !== undefined) one.checked = value ? value.includes(one.value) : usual;
        else if (one.type === "checkbox") one.checked = value ?? usual;
        else one.value = value === null ? "" : String(value);
      }
    }
  };
  const clear = (starts) => {
    for (const one of form.elements) {
      if (!one.name || !starts.some((start) => one.name.startsWith(start))) continue;
      if (one.type === "checkbox") one.checked = one.dataset.default === "true";
      else one.value = "";
    }
  };
  const step = (input, factor) => {
    const shown = input.value.trim() || input.placeholder;
    const found = /^(\d+(?:\.\d+)?)\s*([kKmM]?)$/.exec(shown.replaceAll(",", "").replaceAll("_", ""));
    const number = found ? Number(found[1]) * { "": 1, k: 1024, m: 1048576 }[found[2].toLowerCase()] : 1;
    const next = factor > 1 ? number * 2 : Math.max(1, Math.floor(number / 2));
    input.value = next >= 8192 && next % 1024 === 0 && input.name === "job.seq_len" ? `${next / 1024}K` : String(next);
    soon();
  };

  form.addEventListener("input", soon);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("click", (event) => {
    const button = event.target.closest("[data-step]");
    if (button) step(button.parentElement.querySelector("input"), button.dataset.step === "double" ? 2 : 0.5);
  });
  form.addEventListener("keydown", (event) => {
    const input = event.target;
    if (!input.closest(".stepper") || input.tagName !== "INPUT") return;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      event.preventDefault();
      step(input, event.key === "ArrowUp" ? 2 : 0.5);
    }
  });
  document.addEventListener("click", (event) => {
    const fix = event.target.closest("[data-fix]");
    const use = event.target.closest("[data-use]");
    if (fix) { set(JSON.parse(fix.dataset.fix)); refresh(); }
    if (use) {
      clear(["layout.", "knobs."]);
      set(rows[Number(use.dataset.use)].set);
      asked = questionOf();  // the list stays: its own choice is no new question
      refresh();
    }
  });

  let rows = [], looking = 0;
  const cell = (row, text, numeric) => {
    const made = row.insertCell();
    made.textContent = text;
    if (numeric) made.className = "number";
    return made;
  };
  const list = (found) => {
    const place = document.getElementById("at-layouts");
    place.textContent = "";
    rows = found.rows;
    const said = document.createElement("p");
    said.className = "note";
    const counted = () => `${found.searched.toLocaleString("en")} choices in ${found.seconds} s, estimated`;
    said.textContent = found.why || `${counted()}; the best that fit, as threefold plan ranks them.`;
    place.append(said);
    if (!rows.length) return;
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const name of ["layout", "chunks", "precision", "recompute", "TFLOP/s a GPU", "GiB", "wall", ""]) {
      const made = document.createElement("th");
      made.textContent = name;
      made.scope = "col";
      head.append(made);
    }
    const body = table.createTBody();
    rows.forEach((one, i) => {
      const row = body.insertRow();
      cell(row, one.layout);
      cell(row, String(one.chunks), true);
      cell(row, one.precision);
      cell(row, one.recompute.join(", ") || "none");
      cell(row, one.tflops.toFixed(one.tflops < 10 ? 3 : 0), true);
      cell(row, (one.device_bytes / 2 ** 30).toFixed(1), true);
      cell(row, one.wall);
      const use = document.createElement("button");
      use.type = "button";
      use.className = "small";
      use.textContent = "Use";
      use.dataset.use = String(i);
      use.setAttribute("aria-label", `Use ${one.layout}`);
      cell(row, "").append(use);
    });
    const box = document.createElement("div");
    box.className = "wide";
    box.append(table);
    place.append(box);
  };
  // Work that takes seconds: asked for until it is done, or until a newer question takes its place.
  const follow = async (path, question, isCurrent, place, word) => {
    try {
      for (;;) {
        const found = await ask(path, question);
        if (!isCurrent()) return null;
        if (found.state === "done") return found;
        if (found.state === "failed") { place.textContent = `${word} failed: ${found.why}`; return null; }
        place.textContent = `${word} … ${found.seconds} s`;
        await new Promise((done) => setTimeout(done, 400));
        if (!isCurrent()) return null;
      }
    } catch (error) {
      place.textContent = `No answer: ${error.message}`;
      return null;
    }
  };
  const questionOf = () => JSON.stringify(Object.entries(fields()).filter(([name]) =>
    name === "knobs.precision" || (!/^(layout|knobs)\./.test(name) && name !== "job.micro_batch")));
  let asked = "", later = 0;
  const search = async () => {
    const question = questionOf();
    if (question === asked) return;
    asked = question;
    const mine = ++looking;
    const place = document.getElementById("at-layouts");
    const found = await follow("/layouts", fields(), () => mine === looking, place, "Searching");
    if (found) list(found);
  };
  const searchLater = () => { clearTimeout(later); later = setTimeout(search, 700); };
  let trying = 0;
  document.getElementById("try").addEventListener("click", async (event) => {
    const mine = ++trying, answered = again, button = event.target;
    const found = await follow("/fixes", fields(), () => mine === trying && answered === again, button, "Trying");
    button.textContent = "Try fixes";
    if (found) put("findings", found.html);
  });

  try {
    const kept = new URLSearchParams(location.hash.slice(1)).get("plan");
    if (kept) {
      const wanted = JSON.parse(kept);
      clear(["model", "target", "cluster.", "job.", "layout.", "knobs."]);
      set(wanted);
    }
  } catch { /* an address that somebody wrote by hand */ }
  refresh();
})();
