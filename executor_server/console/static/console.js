// Streams of changes. With HTTP/1.1 a browser has six connections to one address, and each stream takes one: a seventh
// page would never load. So a page that is hidden has no stream, unless it is marked: an approver's page waits for requests.
"use strict";

const HIDDEN_MS = 10000;

class Stream {
  #url;
  #listeners = [];
  #source = null;
  #ended = false;
  #timer = 0;

  constructor(url) {
    this.#url = url;
    document.addEventListener("visibilitychange", () => this.#adapt());
    if (!document.hidden || document.body.dataset.stays !== undefined) {
      this.#open();
    }
  }

  get readyState() {
    return this.#ended ? EventSource.CLOSED : (this.#source?.readyState ?? EventSource.CONNECTING);
  }

  addEventListener(name, listener) {
    this.#listeners.push([name, listener]);
    this.#source?.addEventListener(name, listener);
  }

  removeEventListener(name, listener) {
    this.#listeners = this.#listeners.filter((each) => each[0] !== name || each[1] !== listener);
    this.#source?.removeEventListener(name, listener);
  }

  close() {
    this.#ended = true;
    this.#source?.close();
  }

  #open() {
    this.#source = new EventSource(this.#url);
    this.#source.onopen = (event) => this.onopen?.(event);
    this.#source.onerror = (event) => {
      this.#ended = this.#source?.readyState === EventSource.CLOSED;
      this.onerror?.(event);
    };
    for (const [name, listener] of this.#listeners) {
      this.#source.addEventListener(name, listener);
    }
  }

  #adapt() {
    clearTimeout(this.#timer);
    if (this.#ended || document.body.dataset.stays !== undefined) {
      return;
    }
    if (!document.hidden && this.#source === null) {
      this.#open();
    } else if (document.hidden) {
      this.#timer = setTimeout(() => {
        this.#source?.close();
        this.#source = null;
      }, HIDDEN_MS);
    }
  }
}

htmx.createEventSource = (url) => new Stream(url);
