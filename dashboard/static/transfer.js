// Uploads one file in parts, to presigned URLs of S3 or to this server: a part is a slice of the
// file, read when it is sent, three at a time; parts that arrived are not sent again, even after a
// reload.

import { call, key, post } from "./session.js";
import { messageOf } from "./words.js";

const AT_ONCE = 3;
const MAX_TRIES = 6;
const MAX_DELAY_SECONDS = 30;
const URLS_AT_ONCE = 20;
const COMPLETE_TRIES = 60;
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

/** Send a file and return its ID in the API; `onProgress` is called with the bytes sent.
 * Throws an Error with a message; the same call resumes the upload. */
export async function transfer(file, { signal, onProgress }) {
  const upload = (await known(file)) || (await begin(file));
  const parts = new Parts(file, upload, onProgress);
  const failing = new AbortController();
  const either = AbortSignal.any([signal, failing.signal]);
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, () => parts.sendAll(either)));
  } catch (problem) {
    // The next try cannot use parts in flight.
    failing.abort(problem);
    throw problem;
  }
  const done = await complete(upload.id, signal);
  forget(file);
  return done.file.id;
}

/** Cancel an upload and have its parts deleted. */
export async function giveUp(file) {
  const id = sessionStorage.getItem(nameOf(file));
  forget(file);
  if (id) await post(`/v1/uploads/${id}/cancel`, {}).catch(() => {});
}

// Identifies a file after a reload, when it is chosen again.
const nameOf = (file) => `tidemill-upload ${file.name} ${file.size} ${file.lastModified}`;
const forget = (file) => sessionStorage.removeItem(nameOf(file));

async function known(file) {
  const id = sessionStorage.getItem(nameOf(file));
  if (!id) return null;
  const upload = await call(`/v1/uploads/${id}`).catch(() => null);
  return upload?.status === "pending" ? upload : null;
}

async function begin(file) {
  const upload = await post("/v1/uploads", {
    bytes: file.size, filename: file.name, mime_type: "application/jsonl", purpose: "batch",
  });
  sessionStorage.setItem(nameOf(file), upload.id);
  return upload;
}

async function complete(id, signal) {
  for (let tried = 1; ; tried += 1) {
    try {
      return await post(`/v1/uploads/${id}/complete`, { part_ids: [] });
    } catch (problem) {
      // For a large file the server may need several calls.
      const isPassing = problem.status === 503 || problem.status === undefined;
      if (!isPassing || tried === COMPLETE_TRIES || signal.aborted) throw problem;
      await sleep(1);
    }
  }
}

class Parts {
  constructor(file, upload, onProgress) {
    const { part_bytes: partBytes, uploaded } = upload.tidemill;
    const isThere = new Set(uploaded);
    const numbers = Array.from({ length: Math.ceil(file.size / partBytes) }, (_, index) => index + 1);
    this.file = file;
    this.id = upload.id;
    this.partBytes = partBytes;
    this.onProgress = onProgress;
    this.left = numbers.filter((number) => !isThere.has(number));
    this.sent = new Map(uploaded.map((number) => [number, this.slice(number).size]));
    this.urls = new Map();
    this.asking = null;
    this.tell();
  }

  slice(number) {
    return this.file.slice((number - 1) * this.partBytes, number * this.partBytes);
  }

  /** Send parts until none is left; several may do so at once. */
  async sendAll(signal) {
    while (this.left.length > 0) await this.send(this.left.shift(), signal);
  }

  async send(number, signal) {
    for (let tried = 1; ; tried += 1) {
      signal.throwIfAborted();
      const failure = await this.put(await this.urlOf(number), number, signal);
      if (failure === null) return;
      // The URL may have expired.
      this.urls.delete(number);
      this.note(number, 0);
      if (tried === MAX_TRIES) throw new Error(`Part ${number} could not be uploaded: ${failure}`);
      await sleep(Math.min(2 ** (tried - 1), MAX_DELAY_SECONDS) * (0.5 + Math.random()));
    }
  }

  async urlOf(number) {
    while (!this.urls.has(number)) {
      this.asking ??= this.askForUrls(number).finally(() => (this.asking = null));
      await this.asking;
    }
    return this.urls.get(number);
  }

  async askForUrls(number) {
    const wanted = [number, ...this.left.filter((other) => !this.urls.has(other))].slice(0, URLS_AT_ONCE);
    const path = `/v1/uploads/${this.id}/urls`;
    const answer = await post(path, { part_numbers: wanted });
    // A local server's URLs are relative to its response.
    const base = new URL(path, location.origin);
    for (const { part_number: its, url } of answer.data) this.urls.set(its, new URL(url, base));
  }

  /** PUT one part; resolves with the error, or null. Only XMLHttpRequest reports progress. */
  put(url, number, signal) {
    return new Promise((resolve, reject) => {
      const body = this.slice(number);
      const sending = new XMLHttpRequest();
      const abort = () => sending.abort();
      signal.addEventListener("abort", abort, { once: true });
      sending.onloadend = () => signal.removeEventListener("abort", abort);
      sending.upload.onprogress = (event) => this.note(number, Math.min(event.loaded, body.size));
      sending.onerror = () => resolve("the connection was interrupted");
      sending.onabort = () => reject(signal.reason);
      sending.onload = () => {
        if (sending.status === 200) this.note(number, body.size);
        resolve(sending.status === 200 ? null : messageOf(sending.responseText, sending.status));
      };
      sending.open("PUT", url);
      // S3 accepts no key: its URLs are presigned.
      if (url.origin === location.origin) sending.setRequestHeader("Authorization", `Bearer ${key()}`);
      sending.send(body);
    });
  }

  note(number, bytes) {
    this.sent.set(number, bytes);
    this.tell();
  }

  tell() {
    this.onProgress([...this.sent.values()].reduce((sum, bytes) => sum + bytes, 0));
  }
}
