// Jobs and schedules: when each is due, how it went, and "run now" for who may; which models batch jobs need when.

import { h, sign, table } from "./dom.js";
import { ago, clock, moment, span, whole } from "./format.js";
import { modelLink } from "./now.js";

export const marks = ["jobs"];
const RESULTS = {
  done: ["good", "done"], failed: ["bad", "failed"], lost: ["bad", "lost with its process"], hung: ["bad", "took too long"],
  stopped: ["note", "stopped"], skipped: ["note", "skipped"], running: ["quiet", "runs"], wanted: ["quiet", "wanted"],
};

export function make(page) {
  const jobs = page.source();
  const schedules = page.source();
  const wanted = new Map();
  let said = "";

  function load() {
    jobs.load("v1/jobs");
    schedules.load("v1/schedules");
  }

  function view() {
    return [
      h("section", { "data-key": "jobs", "aria-labelledby": "jobs-head" }, h("h2", { id: "jobs-head" }, "Jobs"),
        page.standing(jobs, "the jobs"),
        h("p", { role: "status", class: "said", "data-key": "said" }, said),
        jobs.data ? jobsView(jobs.data) : null),
      h("section", { "data-key": "schedules", "aria-labelledby": "schedules-head" }, h("h2", { id: "schedules-head" }, "Batch schedules"),
        page.standing(schedules, "the schedules"), schedules.data ? schedulesView(schedules.data) : null),
    ];
  }

  function jobsView(told) {
    if (told.length === 0) return h("p", { class: "empty" }, "No scheduler ever looked for work here. Start one: ",
      h("code", {}, "prefetcher scheduler"));
    const now = page.overview()?.jobs.now_s ?? Date.now() / 1000;
    const mayAct = page.mayAct();
    return [
      table("Jobs, when they are due and how they went", ["Job", "When", "Next", "Last run", "Result", "Run"], told.map((job) => ({
        key: job.name,
        cells: [
          h("span", {}, job.name, h("span", { class: "small line" }, job.what)),
          job.times,
          h("span", { title: moment(job.next_s) }, ago(job.next_s, now)),
          job.last ? h("span", { title: moment(job.last.began_s) }, `${ago(job.last.began_s, now)}, took ${span(job.last.took_s)}`)
            : "never",
          result(job),
          button(job, mayAct),
        ],
      }))),
      mayAct ? null : h("p", { class: "small" }, "Run now takes a key with role operator."),
    ];
  }

  function result(job) {
    if (job.running) {
      const far = job.running.share === null || job.running.share === undefined ? "" : ` ${Math.round(100 * job.running.share)} %`;
      return sign("quiet", `runs${far}${job.running.step ? `: ${job.running.step}` : ""}`);
    }
    if (job.wanted) return sign("quiet", "wanted, not begun yet");
    if (!job.last) return h("span", { class: "small" }, "no run yet");
    const [kind, words] = RESULTS[job.last.result] || ["quiet", job.last.result];
    const more = job.last.error || job.last.did;
    return h("span", {}, sign(kind, words), more ? h("span", { class: "small line" }, more) : null);
  }

  function button(job, mayAct) {
    const busy = job.running || job.wanted || wanted.has(job.name);
    return h("button", { type: "button", "data-act": "run", "data-job": job.name, disabled: !mayAct || Boolean(busy),
      "aria-label": `Run ${job.name} now` }, "Run now");
  }

  function schedulesView(told) {
    if (told.length === 0) {
      return h("p", { class: "empty" }, "No batch job has told when it needs models. ", h("code", {}, "prefetcher schedule add"),
        " has them there before it begins.");
    }
    const now = page.now();
    return table("Batch schedules", ["Schedule", "Models", "When", "Window", "In memory for it"], told.map((one) => ({
      key: one.name,
      cells: [
        one.name,
        h("span", {}, one.models.slice(0, 6).map((model, i) => [i ? ", " : "", modelLink(model)]),
          one.models.length > 6 ? ` and ${one.models.length - 6} more` : ""),
        `${one.at}, ${one.days.join(" ")} (${one.tz}), for ${span(one.for_s)}`,
        one.next_start_s === null ? "none" : h("span", { title: moment(one.next_start_s) }, one.open
          ? `open until ${clock(one.next_end_s, now, false)}` : ago(one.next_start_s, now)),
        `${whole(one.staged.length)} of ${whole(one.models.length)}`,
      ],
    })));
  }

  async function act(name, element) {
    if (name !== "run") return;
    const job = element.dataset.job;
    wanted.set(job, true);
    said = `Asking for a run of ${job}…`;
    page.draw();
    try {
      const told = await page.ask(`v1/jobs/${encodeURIComponent(job)}:run`, { method: "POST" });
      said = `A run of ${job} is wanted (${told.run_id}).`;
      await follow(job, told.run_id);
    } catch (error) {
      said = `${job} was not run: ${error.message}.`;
    }
    wanted.delete(job);
    load();
    page.draw();
  }

  async function follow(job, runId) {
    for (let tries = 0; tries < 120; tries += 1) {
      const run = await page.ask(`v1/jobs/${encodeURIComponent(job)}/runs/${runId}`);
      if (run.result !== "wanted" && run.result !== "running") {
        const [, words] = RESULTS[run.result] || ["", run.result];
        said = `${job}: ${words}${run.error || run.did ? `, ${run.error || run.did}` : ""}.`;
        return;
      }
      load();
      await new Promise((resume) => setTimeout(resume, 500));
    }
  }

  return { load, view, act };
}
