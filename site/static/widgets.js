/* The book's widgets, and one help for keyboards. Python (site/bookext/widgets.py) draws each of them and works out every frame; this shows frames.
   A slot `ada` is the text of the elements with data-slot="ada", `ada@data-is` their attribute, `ada@--w` their CSS
   variable. Without this file the first frame stands on the page as it is. */
"use strict";
{
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const SAME = 0; // in a packed frame: what the frame before has

  class Player extends HTMLElement {
    connectedCallback() {
      if (this.frames) return;
      const data = JSON.parse(this.querySelector("script").textContent);
      this.slots = data.slots.map((slot) => this.findSlot(slot));
      this.told = data.slots.findIndex((slot) => slot === "said" || slot === "time"); // to who hears the slider
      this.frames = unpacked(data.frames);
      this.times = data.times.length ? data.times : this.frames.map((_, i) => i / Math.max(1, this.frames.length - 1));
      this.seconds = data.seconds;
      this.nearest = data.nearest;
      this.addControls(data.label);
      this.listen();
      this.show(data.start);
      if (data.autoplay && this.seconds) this.playWhenSeen();
    }

    disconnectedCallback() { this.pause(); }

    findSlot(slot) {
      const [name, place] = slot.split("@");
      return { place, elements: this.querySelectorAll(`[data-slot="${CSS.escape(name)}"]`) };
    }

    /* The state after step k; the slider, the keys, the mouse and the clock all end here. */
    show(k) {
      this.k = Math.max(0, Math.min(this.frames.length - 1, k));
      this.slots.forEach(({ place, elements }, i) => {
        const value = this.frames[this.k][i];
        for (const element of elements) {
          if (!place) element.textContent = value;
          else if (place.startsWith("--")) element.style.setProperty(place, value);
          else element.setAttribute(place, value);
        }
      });
      this.slider.value = this.k;
      this.place.textContent = `${this.k + 1} / ${this.frames.length}`;
      this.slider.setAttribute("aria-valuetext", this.frames[this.k][this.told] ?? this.place.textContent);
    }

    addControls(label) {
      const controls = add(this, "div", { class: "mv-controls", role: "group", "aria-label": `Step through ${label}` });
      if (this.seconds && !calm.matches) {
        this.button = add(controls, "button", { type: "button", class: "mv-play" }, "Play");
        this.button.onclick = () => (this.clock ? this.pause() : this.play());
      }
      const step = (by, name, sign) => {
        const button = add(controls, "button", { type: "button", "aria-label": name }, sign);
        button.onclick = () => { this.pause(); this.show(this.k + by); };
      };
      step(-1, "One step back", "◀");
      const range = { type: "range", min: 0, max: this.frames.length - 1, "aria-label": label };
      this.slider = add(controls, "input", range);
      this.slider.oninput = () => { this.pause(); this.show(+this.slider.value); };
      step(1, "One step on", "▶");
      this.place = add(controls, "span", { class: "mv-place" });
    }

    /* A click or a drag in a picture goes to the frame of that place. */
    listen() {
      for (const area of this.querySelectorAll(".mv-area")) {
        const seek = (event) => {
          const box = (area.querySelector(".mv-bars, .mv-plot") || area).getBoundingClientRect();
          this.pause();
          this.show(this.at((event.clientX - box.left) / box.width));
        };
        area.addEventListener("pointerdown", seek);
        area.addEventListener("pointermove", (event) => { if (event.buttons || this.nearest) seek(event); });
      }
    }

    /* The last frame at or before a time from 0 to 1; in a chart the nearest. */
    at(time) {
      if (this.nearest)
        return this.times.reduce((best, t, i) => (Math.abs(t - time) < Math.abs(this.times[best] - time) ? i : best), 0);
      return Math.max(0, this.times.findLastIndex((t) => t <= time));
    }

    play() {
      if (this.k === this.frames.length - 1) this.show(0);
      const begin = performance.now() - 1000 * this.seconds * this.times[this.k];
      const tick = (now) => {
        const time = (now - begin) / (1000 * this.seconds);
        const k = this.at(time);
        if (k !== this.k) this.show(k);
        if (time >= 1) return this.pause();
        this.clock = requestAnimationFrame(tick);
      };
      this.clock = requestAnimationFrame(tick);
      this.button.textContent = "Pause";
    }

    pause() {
      if (!this.clock) return;
      cancelAnimationFrame(this.clock);
      this.clock = null;
      this.button.textContent = "Play";
    }

    playWhenSeen() {
      if (calm.matches) return;
      const watch = new IntersectionObserver(([entry]) => {
        if (!entry.isIntersecting) return;
        watch.disconnect();
        this.play();
      }, { threshold: 0.6 });
      watch.observe(this);
    }
  }

  function unpacked(rows) {
    let before = [];
    return rows.map((row) => (before = row.map((value, i) => (value === SAME ? before[i] : value))));
  }

  function add(parent, tag, attributes, text = "") {
    const element = parent.appendChild(document.createElement(tag));
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }

  /* Code and tables that are wider than the page can be scrolled by keys too. */
  const reach = () => {
    for (const wide of document.querySelectorAll("pre, .table-wrapper"))
      if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
      else wide.removeAttribute("tabindex");
  };
  addEventListener("load", reach);
  addEventListener("resize", reach);

  for (const name of ["timeline", "blocks", "prefix", "rows", "tokens", "guesses", "roofline", "chart"])
    customElements.define(`mv-${name}`, class extends Player {});
}
