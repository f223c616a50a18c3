// Search of pages that are opened as files: a browser starts no worker there,
// so a frame of the same page plays the worker, and messages are events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.tell(this, data)
      const script = this.inside.document.createElement("script")
      script.src = url
      this.ready = new Promise(resolve => (script.onload = resolve))
      this.inside.document.body.append(script)
    }
    tell(to, data) {
      const message = new MessageEvent("message", { data })
      to.dispatchEvent(message)
      if (to.onmessage && to === this) to.onmessage(message)
    }
    postMessage(data) {
      this.ready.then(() => this.tell(this.inside, data))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
