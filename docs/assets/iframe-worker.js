// The search runs in a Worker, which browsers refuse for pages that are opened from disk. There, a hidden frame runs
// its script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        script.src = address
        script.onload = resolve
        script.onerror = () => reject(new Error(`${address} could not be loaded`))
        this.scope.document.body.append(script)
      })
    }

    async postMessage(data) {
      await this.ready
      this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
    }
  }
}
