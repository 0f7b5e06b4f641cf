/*
 * Lets the search work where the site is opened from the disk. A browser starts no worker from a file, so the worker's
 * script runs in a hidden frame of the page, which passes copies of messages as a worker does. Elsewhere this changes nothing.
 */
if (location.protocol === "file:") {
  // The theme's script asks for this name in the frame's parent, to find its files.
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      // Written at once: a browser may load the empty page later, and would drop the script then.
      inner.document.open();
      inner.document.write("<!doctype html><title>search</title>");
      inner.document.close();
      inner.postMessage = (data) => {
        const message = new MessageEvent("message", { data: structuredClone(data) });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      this.ready = new Promise((done) => {
        const script = inner.document.createElement("script");
        script.src = url;
        script.onload = done;
        inner.document.head.append(script);
      });
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
