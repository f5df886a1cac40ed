"use strict";
// Draws one chart a group of series; every run has one colour, a second series of the same chart is dashed.
(function () {
  const runs = JSON.parse(document.getElementById("data").textContent).runs;
  const specs = [
    { title: "Reward", note: "training samples at the sampling temperature", keys: { reward_mean: "" }, range: [0, 1] },
    { title: "Held-out accuracy", note: "solid: sampled · dashed: greedy",
      keys: { eval_accuracy: "sampled", eval_accuracy_greedy: "greedy" }, range: [0, 1] },
    { title: "Response length", note: "tokens, mean", keys: { response_tokens_mean: "" } },
    { title: "Truncated", note: "share of samples cut at the limit", keys: { truncated_fraction: "" } },
    { title: "Entropy", note: "nats a token", keys: { entropy: "" } },
    { title: "KL, rollout against trainer", note: "0 = the same arithmetic on both sides",
      keys: { train_rollout_kl: "", "train/ref_kl": "to the reference" } },
    { title: "KL, policy against the rollout's policy", note: "drift inside a step", keys: { "train/ppo_kl": "" } },
    { title: "Clip fraction", note: "share of tokens where the clip is active", keys: { "train/pg_clipfrac": "" } },
    { title: "Gradient norm", note: "before clipping", keys: { grad_norm: "" } },
    { title: "Speed", note: "tokens/s · solid: rollout · dashed: training",
      keys: { rollout_tokens_per_s: "rollout", train_tokens_per_s: "training" } },
  ];
  const place = document.getElementById("charts");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let charts = [];

  function datasets(spec) {
    const list = [];
    runs.forEach((run, r) => {
      Object.entries(spec.keys).forEach(([key, label], k) => {
        const points = run.steps
          .map((step, i) => ({ x: step, y: run.series[key] ? run.series[key][i] : null }))
          .filter((point) => point.y !== null);
        if (points.length === 0) return;
        const colour = css("--run" + (r % 6));
        list.push({
          label: [runs.length > 1 ? run.name : "", label].filter(Boolean).join(" · ") || spec.title,
          data: points, borderColor: colour, backgroundColor: colour, borderWidth: 2,
          borderDash: k > 0 ? [5, 4] : [], pointRadius: points.length > 25 ? 0 : 2.5, pointHitRadius: 8, tension: 0, clip: 6,
        });
      });
    });
    return list;
  }

  function draw() {
    charts.forEach((chart) => chart.destroy());
    charts = [];
    place.replaceChildren();
    for (const spec of specs) {
      const data = datasets(spec);
      if (data.length === 0) continue;
      const card = document.createElement("section");
      card.className = "chart";
      const title = document.createElement("h3");
      title.textContent = spec.title;
      const note = document.createElement("p");
      note.textContent = spec.note;
      const box = document.createElement("div");
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", spec.title + " by step; first and last values are in the table below");
      box.append(canvas);
      card.append(title, note, box);
      place.append(card);
      const axis = { grid: { color: css("--line") }, ticks: { color: css("--muted") } };
      const y = Object.assign({}, axis, spec.range ? { min: spec.range[0], max: spec.range[1] } : { beginAtZero: true });
      charts.push(new Chart(canvas, {
        type: "line",
        data: { datasets: data },
        options: {
          animation: false, maintainAspectRatio: false, interaction: { mode: "nearest", axis: "x", intersect: false },
          scales: { x: Object.assign({ type: "linear", title: { display: true, text: "step", color: css("--muted") } }, axis), y },
          plugins: { legend: { display: data.length > 1, labels: { color: css("--text"), boxWidth: 22, boxHeight: 1 } } },
        },
      }));
    }
  }
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
