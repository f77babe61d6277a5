/*
 * hint.js: a page says that a model will be used soon, so that its weights are there when the request comes.
 *
 *   <script data-src="https://prefetch.example/hint.js" data-key="pk_…" data-surface="chat" data-model="llama-8b">
 *     import(document.currentScript.dataset.src).catch(() => {});
 *   </script>
 *
 * never delays the page, whatever the endpoint does; <script async src="…" data-key=…> does the same where the script comes from servers
 * that the page waits for anyway, since browsers hold the load event for it.
 *
 * It sends one hint for data-model, or for the surface alone. Then
 *   prefetcher.hint({model: "whisper", in_s: 5, ttl_s: 60})
 * says what somebody may be about to use, and an element with data-hint="whisper" says it by itself when it is pointed at, focused or typed into; a select with
 * data-hint says which value it has. data-in and data-ttl are seconds for the first hint, data-session an id of your own, data-url
 * where to send hints, if not beside the script. What was in prefetcher.q before the script came is said too.
 *
 * What goes out is the fields of `fields`, a random id of this view of the page, and the publishable key: no cookie, no storage, nothing
 * about who sees it, and nothing at all under Do-Not-Track, Global Privacy Control or Save-Data. The browser sends it when it has time;
 * nothing waits for an answer, nothing listens to unload, nothing throws. What was said is not said again in the first half of its time.
 *
 * It is served without comments and spaces (`prefetcher.dashboard.script`), so: a semicolon after every statement, and no regular expressions.
 */
(function (w, d, n) {
  "use strict";
  var tag = d.currentScript || d.querySelector("script[data-src]") || {};
  var set = tag.dataset || {};
  var url = set.url || (tag.src || set.src || "/").split("hint.js")[0] + "v1/hints";
  var fields = ["model", "in_s", "ttl_s", "session", "surface", "kind"];
  var before = w.prefetcher || {};
  var silentUntil = {};
  var session = set.session || random();

  if (before.hint && !before.q) {
    return;
  }

  function random() {
    return (Math.random().toString(36) + Math.random().toString(36)).split("0.").join("");
  }

  function unwanted() {
    return n.doNotTrack === "1" || w.doNotTrack === "1" || n.globalPrivacyControl || (n.connection && n.connection.saveData);
  }

  /* Whether the browser took it. */
  function hint(what) {
    try {
      var said = {session: session, surface: set.surface, kind: "intent"};
      fields.forEach(function (name) {
        if (what[name] != null && what[name] !== "") {
          said[name] = what[name];
        }
      });
      var same = JSON.stringify(said);
      var now = Date.now();
      if (!(said.model || said.surface) || unwanted() || silentUntil[same] > now) {
        return false;
      }
      silentUntil[same] = now + 500 * (said.ttl_s || 120);
      said.hint_id = random();
      said.key = set.key;
      var body = JSON.stringify(said);
      if (!(n.sendBeacon && n.sendBeacon(url, body))) {
        w.fetch(url, {method: "POST", body: body, keepalive: true, credentials: "omit"}).catch(function () {});
      }
      return true;
    } catch (error) {
      return false;
    }
  }

  function intent(event) {
    var at = event.target && event.target.closest && event.target.closest("[data-hint]");
    if (at) {
      hint({model: at.dataset.hint || (at.tagName === "SELECT" ? at.value : "")});
    }
  }

  function begin() {
    if (set.model || set.surface) {
      hint({model: set.model, in_s: +set.in || null, ttl_s: +set.ttl || null, kind: "load"});
    }
  }

  w.prefetcher = {hint: hint};
  if (d.prerendering) {
    d.addEventListener("prerenderingchange", begin, {once: true});
  } else {
    begin();
  }
  (before.q || []).forEach(hint);
  ["pointerover", "focusin", "input"].forEach(function (type) {
    d.addEventListener(type, intent, {capture: true, passive: true});
  });
})(window, document, navigator);
