// Search of the site opened from a folder: browsers start no worker from file://, so a hidden frame takes its place.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.inside = new Promise((resolve) => (frame.onload = () => resolve(frame.contentWindow))).then((inside) => {
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        return inside;
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
