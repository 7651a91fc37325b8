// Runs the engine of Perfetto's viewer, a script for browsers' workers, in node:
// node perfetto.js ENGINE_BUNDLE <requests >replies, each request after its length in 4 bytes.
const fs = require("fs");
const path = require("path");
const bundle = process.argv[2];
const beside = (url) => fs.readFileSync(path.join(path.dirname(bundle), path.basename(url)));

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.importScripts = () => {};
globalThis.location = { href: bundle };
globalThis.XMLHttpRequest = class {
    open(method, url) { this.url = url; }
    send() {
        const bytes = beside(this.url);
        this.status = 200;
        this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    }
};
const node = globalThis.process;
console.log = console.warn = () => {}; // of its own progress
globalThis.process = undefined; // with it the engine would take itself to be in node, which it is not made for
(0, eval)(fs.readFileSync(bundle, "utf8"));
globalThis.process = node;

const port = { postMessage: (reply) => fs.writeSync(1, reply) };
globalThis.onmessage({ data: port });
setImmediate(() => {
    const requests = fs.readFileSync(0);
    for (let at = 0; at < requests.length; ) {
        const size = requests.readUInt32LE(at);
        port.onmessage({ data: new Uint8Array(requests.subarray(at + 4, at + 4 + size)) });
        at += 4 + size;
    }
    node.exit(0);
});
