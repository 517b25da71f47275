// Unpacks the Chromium of @sparticuz/chromium, with the libraries and the font that it brings, and
// writes a command that runs it with them:
//     node unpack.mjs FOLDER

import { spawnSync } from "node:child_process";
import { chmodSync, createReadStream, createWriteStream, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const packed = new URL("node_modules/@sparticuz/chromium/bin/", import.meta.url);
const folder = resolve(process.argv[2]);

async function unpack(name, target) {
  const source = createReadStream(new URL(`${name}.br`, packed));
  await pipeline(source, createBrotliDecompress(), createWriteStream(target));
}

mkdirSync(folder, { recursive: true });
for (const name of ["al2023.tar", "swiftshader.tar", "fonts.tar"]) {
  await unpack(name, `${folder}/${name}`);
  const done = spawnSync("tar", ["-xf", name], { cwd: folder, stdio: "inherit" });
  if (done.status !== 0) throw new Error(`${name} cannot be unpacked`);
  rmSync(`${folder}/${name}`);
}
await unpack("chromium", `${folder}/chromium`);
writeFileSync(
  `${folder}/fonts.conf`,
  `<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>${folder}/fonts</dir><cachedir>${folder}/fonts-cache</cachedir></fontconfig>
`,
);
writeFileSync(
  `${folder}/run`,
  `#!/bin/sh
LD_LIBRARY_PATH="${folder}/lib" FONTCONFIG_FILE="${folder}/fonts.conf" exec "${folder}/chromium" "$@"
`,
);
chmodSync(`${folder}/chromium`, 0o755);
chmodSync(`${folder}/run`, 0o755);
