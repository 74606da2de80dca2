// Bundles src/ into ../app/page/static/, and writes beside it what the bundle was made from and under
// which licences. The same sources and lock file give the same bytes.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "..", "app", "page");
const out = join(target, "static");
const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");

await mkdir(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.jsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(join(here, "src", name), join(out, name));

// Whoever has no Node can still see whether the bundle fits its sources.
const sources = ["build.mjs", "package.json", "package-lock.json"];
sources.push(...(await readdir(join(here, "src"))).sort().map((name) => `src/${name}`));
const hashed = async (folder, names) =>
  Object.fromEntries(await Promise.all(names.map(async (n) => [n, sha256(await readFile(join(folder, n)))])));
const manifest = {
  sources: await hashed(here, sources),
  files: await hashed(out, (await readdir(out)).sort()),
};
await writeFile(join(target, "bundle.json"), JSON.stringify(manifest, null, 2) + "\n");

const { dependencies } = JSON.parse(await readFile(join(here, "package.json")));
const parts = await Promise.all(
  Object.keys(dependencies).sort().map(async (name) => {
    const folder = join(here, "node_modules", name);
    const about = JSON.parse(await readFile(join(folder, "package.json")));
    const licence = (await readdir(folder)).sort().find((file) => /^licen[cs]e/i.test(file));
    const text = (await readFile(join(folder, licence), "utf8")).trim();
    const chosen = about.license === "(MPL-2.0 OR Apache-2.0)" ? "Apache-2.0, of MPL-2.0 or Apache-2.0" : about.license;
    return `## ${name} ${about.version}\n\n${chosen}, ${about.homepage ?? about.repository?.url ?? about.repository}\n\n\`\`\`\n${text}\n\`\`\`\n`;
  }),
);
await writeFile(
  join(target, "LICENSES.md"),
  `# Licences of what the page's bundle contains\n\nWritten by \`make page\`. Everything else in it is Aerie's own, under the licence of the repository.\n\n${parts.join("\n")}`,
);
