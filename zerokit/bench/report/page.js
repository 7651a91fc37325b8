// Every picture of the page, drawn over the still one that stands in its place: what cannot be drawn stays still.
const { config, pictures } = JSON.parse(document.getElementById("specifications").textContent);
for (const [name, specification] of Object.entries(pictures)) {
  const place = document.querySelector(`#${CSS.escape(name)} .plot`);
  const still = [...place.childNodes];
  vegaEmbed(place, specification, {
    actions: false,
    ast: true, // no code from strings: the page's policy forbids it
    config,
    defaultStyle: false,
    renderer: "svg",
    tooltip: { theme: "page" },
  }).catch((error) => {
    console.error(name, error);
    place.replaceChildren(...still);
  });
}
