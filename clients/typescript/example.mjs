// node example.mjs URL TOKEN: a session, a tool that runs here, a figure and a file.
import { writeFileSync } from "node:fs";
import { Client } from "remote-executor";

const [, , url = "http://127.0.0.1:3000", token = ""] = process.argv;
const client = new Client(url, { token });
try {
  const session = await client.createSession({ authorizedImports: ["matplotlib.*"] });
  await session.registerTools({ price: { run: async (name) => name.length * 1.5, parameters: ["name"] } });
  const execution = session.execute(`
import matplotlib.pyplot as plt
names = ["tea", "coffee", "chocolate"]
prices = [price(name) for name in names]
print(prices)
plt.bar(names, prices)
plt.show()
with open("prices.txt", "w") as file: file.write(str(prices))
dict(zip(names, prices))`);
  for await (const event of execution) {
    if (event.kind === "log") process.stdout.write(event.text);
    if (event.kind === "image") writeFileSync("prices.png", event.data);
  }
  const result = await execution;
  console.log(result.outcome, { ...result.output }, await session.files.readText("prices.txt"));
} finally {
  await client.close();
}
